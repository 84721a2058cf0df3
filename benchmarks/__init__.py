"""Benchmarks of pdserve: replay, comparison, chaos, soak, simulation and planning (`pdserve
bench`)."""
