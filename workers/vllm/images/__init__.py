"""Prompts with images, rendered in separate processes."""
