"""The default placement policy beside fixed ones, and whether it ever loses."""
