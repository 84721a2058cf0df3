"""Connections of routers: requests and their streams, registration, control, pages."""
