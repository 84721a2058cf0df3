"""TLS, API keys and roles of callers."""
