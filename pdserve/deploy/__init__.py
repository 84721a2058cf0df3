"""Services on clusters: how many workers a load asks for, and the processes on Ray."""
