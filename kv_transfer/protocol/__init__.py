"""The protocol of KV transfers between two workers, without vLLM and torch."""
