"""Deployment of services: on this machine, on Ray and on Kubernetes, and scaling by load."""
