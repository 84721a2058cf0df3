"""How fast blocks get in and out of staging on a GPU."""
