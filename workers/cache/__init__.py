"""Reports of the prefix cache to routers, and retention of its blocks between turns."""
