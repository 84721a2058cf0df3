"""The steps of a request, one a file. router/serve.py has their order."""
