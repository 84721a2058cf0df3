"""Processes: tie to a parent process, and access to GPUs."""
