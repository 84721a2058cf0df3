"""Placement: which workers serve a request. Pure functions of what is known of each worker."""
