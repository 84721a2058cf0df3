"""Ports where the ranks of a group meet."""

from __future__ import annotations

import errno
import socket

import pytest

from pdserve.deploy.local.groups import free_ports


def test_a_port_and_the_next_one_can_be_bound() -> None:
    port = free_ports("127.0.0.1")
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", port))
        second.bind(("127.0.0.1", port + 1))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError) as refused:  # noqa: PT011 - its number says which
        free_ports("192.0.2.1")
    assert refused.value.errno == errno.EADDRNOTAVAIL
