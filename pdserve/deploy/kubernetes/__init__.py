"""A service on Kubernetes, which starts and ends the pods: how many there are, by load."""
