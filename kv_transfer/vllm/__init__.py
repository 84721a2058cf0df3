"""All contact with vLLM. Tried on vLLM 0.32.0 and 0.33.0 (CPU)."""
