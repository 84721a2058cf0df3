"""A service on a Ray cluster. Ray places processes and restarts them; requests, tokens and KV never
pass through it."""
