"""Faults that no signal can cause, put into the processes of a service under test from outside:
``up`` starts them, ``child`` is what they run. No production path knows of any of it."""
