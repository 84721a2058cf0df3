"""Arms side by side on the same cores and the same traffic: ``pdserve bench compare``."""
