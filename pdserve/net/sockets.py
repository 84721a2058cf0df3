"""TCP: addresses of listeners, and detection of peers that vanish without closing the connection:
the machine crashed, or the network is cut."""

from __future__ import annotations

import contextlib
import socket

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def reachable(address: str) -> str:
    """Return the address that reaches a server listening on `address` from this machine."""
    host, _, port = address.rpartition(":")
    return f"{_EVERYWHERE.get(host, host)}:{port}"


def join_address(host: str, port: int | str) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def detect_dead_peer(sock: socket.socket | None, timeout_s: int) -> None:
    """Make the kernel close the connection if the peer's kernel has not answered for `timeout_s`.
    A peer whose process is busy or stopped still answers."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    probe_s = max(1, timeout_s // 3)
    with contextlib.suppress(OSError, AttributeError):  # options differ between systems
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_s * 1000)
