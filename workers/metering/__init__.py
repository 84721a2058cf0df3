"""Metering of a worker's time and energy, and the health of its GPUs."""
