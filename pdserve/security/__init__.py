"""TLS, API keys, caller roles and protection from web pages."""
