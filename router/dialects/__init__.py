"""Request and response bodies of each API, and their shared parts."""
