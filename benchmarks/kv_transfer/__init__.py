"""How fast KV blocks move between two processes, beside what the machine can do at most."""
