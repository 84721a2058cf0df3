"""Decisions that were made: kept for a while, told to whoever asks, made again otherwise."""
