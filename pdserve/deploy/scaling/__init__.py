"""Decisions about numbers of workers by load, and about canaries."""
