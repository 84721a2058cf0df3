"""The rows of the matrix: one file a fault."""
