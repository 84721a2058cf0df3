"""The engine's prefix cache: its content, and retention of blocks."""
