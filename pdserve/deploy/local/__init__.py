"""`pdserve up`: routers and workers as processes on this machine."""
