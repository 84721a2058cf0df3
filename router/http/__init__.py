"""The OpenAI-compatible face of the router."""
