"""Grammars of requests, compiled in disposable processes before the engine gets them."""
