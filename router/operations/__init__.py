"""Changes of a running service: drain, roles, adapters, probes."""
