"""The workers of this router: membership, leases, connections, health and accounting."""
