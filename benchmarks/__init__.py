"""Measure pdserve: replay, compare, break, simulate and plan (`pdserve bench`)."""
