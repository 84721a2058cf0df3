"""Placement: which workers serve a request. Pure functions over what is known of each worker."""
