"""Sockets, frames, gRPC and HTTP."""
