"""One answer of a request: its attempts, their streams, and what follows a failure."""
