"""Moves paged KV-cache blocks from a prefill worker to a decode worker, as a vLLM connector:
docs/kv_transfer.md."""
