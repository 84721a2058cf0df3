"""The workers of this router: membership, connections, health, drains and role changes."""
