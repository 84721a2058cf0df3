"""One request from admission to its last token. Start with request.py."""
