"""KV is reached at the interface that was named, and at no other."""

from __future__ import annotations

import queue
import socket

import pytest

from kv_transfer.listener import Listener
from tests.patience import WAIT_S


def test_only_the_interface_that_was_named_is_listened_to() -> None:
    listener = Listener("127.0.0.2")
    served: queue.Queue[socket.socket] = queue.Queue()
    listener.start(served.put, lambda: None)
    try:
        host, _, port = listener.address.rpartition(":")
        assert host == "127.0.0.2"
        with socket.create_connection((host, int(port)), timeout=WAIT_S):
            served.get(timeout=WAIT_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=WAIT_S)
    finally:
        listener.close()
    assert served.empty()
