"""Guards: what checks prompts and answers. `guard.py` has their values and verdicts."""
