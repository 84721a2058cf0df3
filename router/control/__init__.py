"""Control of workers: drains, role changes, adapters, health checks, autoscaling."""
