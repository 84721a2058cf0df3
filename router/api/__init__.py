"""The public APIs of the router: OpenAI-compatible HTTP, and gRPC."""
