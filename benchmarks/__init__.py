"""Traces of real traffic, open-loop replay against a serving endpoint, and honest metrics."""
