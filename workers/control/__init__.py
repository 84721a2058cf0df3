"""Control of the requests that a worker accepts: drain, role, adapters."""
