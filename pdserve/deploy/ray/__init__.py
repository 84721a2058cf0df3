"""Services on a Ray cluster. Ray only places and restarts processes; requests, tokens and KV do not
pass through it."""
