"""Persistent state of routers: files, batches, responses and idempotency keys."""
