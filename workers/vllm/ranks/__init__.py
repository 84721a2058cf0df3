"""Coordination of the ranks of one engine, and of the engines of a data-parallel group."""
