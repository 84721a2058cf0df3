"""All contact with vLLM. Tried on vLLM 0.32.0 (CPU)."""
