"""`pdserve bench compare`: variants side by side, with equal cores and equal traffic."""
