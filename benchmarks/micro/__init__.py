"""Micro-benchmarks of one part each: `python -m benchmarks.micro kv|router|tiers|unloaded`."""
