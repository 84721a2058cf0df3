"""``make bench``: the standard set of comparisons, kept, and shown in the README."""
