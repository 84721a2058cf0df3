"""Plots as inline SVG: scales, axes and marks, and nothing to load."""
