"""Connections whose peer is silent are closed by the kernel."""

from __future__ import annotations

import socket

import pytest

from kv_transfer.protocol.link import DEAD_PEER_S, Link


@pytest.mark.parametrize(("is_dialled", "timeout_s"), [(True, DEAD_PEER_S), (False, 20)])
def test_a_kv_link_ends_when_the_other_host_is_silent(*, is_dialled: bool, timeout_s: int) -> None:
    """A consumer that waits for KV must give up before a producer whose consumer is busy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        link = Link("peer", is_dialled=is_dialled, handshake_timeout_s=20.0)
        link.open(sock, send_timeout_s=20.0)
        found_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert found_ms == timeout_s * 1000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        link.release()
