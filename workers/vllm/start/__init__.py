"""Start of an engine: vLLM's settings and environment, and the self-test."""
