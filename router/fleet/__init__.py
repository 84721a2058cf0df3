"""The workers of this router: membership, leases, links, health and billing."""
