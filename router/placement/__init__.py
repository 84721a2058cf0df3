"""Placement: selects workers for a request by pure functions over snapshots of the workers."""
