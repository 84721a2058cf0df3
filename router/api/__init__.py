"""The router's public APIs: HTTP (OpenAI's and Anthropic's) and gRPC."""
