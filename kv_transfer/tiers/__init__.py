"""KV blocks outside the KV cache."""
