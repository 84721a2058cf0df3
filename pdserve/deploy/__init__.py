"""How many workers a service has, wherever its processes run."""
