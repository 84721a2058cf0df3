"""The engine on vLLM: all contact of this package with vLLM. Tried with vLLM 0.32.0."""
