"""How two workers agree on what KV moves between them, without vLLM and torch."""
