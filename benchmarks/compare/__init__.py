"""`pdserve bench compare`: comparison of variants with equal cores and equal traffic."""
