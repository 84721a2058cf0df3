"""Policies: one file each, chosen by name with `router.policy`."""
