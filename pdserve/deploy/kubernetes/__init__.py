"""Services on Kubernetes: a scaler of replicas by load, and an operator with canary rollouts."""
