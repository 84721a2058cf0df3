"""Connections between the ranks of a data-parallel group."""

from __future__ import annotations

import queue
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from workers.vllm.ranks import group_links
from workers.vllm.ranks import join as join_module
from workers.vllm.ranks.group_links import GroupLinks

_HOST = "127.0.0.1"
_RESETS = struct.pack("ii", 1, 0)


@pytest.mark.parametrize("stranger", ["resets", "is silent"])
def test_a_stranger_at_the_port_of_a_group_does_not_end_its_start(
    monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    shared = queue.Queue[bytes]()

    def share(_: object, of_first: bytes) -> bytes:
        if any(of_first):
            shared.put(of_first)
            return of_first
        return shared.get()

    def join(rank: int) -> GroupLinks:
        group: Any = None
        return GroupLinks(group, _HOST, rank=rank, size=2, wake=lambda: None)

    monkeypatch.setattr(group_links, "_share", share)
    monkeypatch.setattr(join_module, "_HELLO_S", 0.1)
    with ThreadPoolExecutor(1) as pool, socket.socket() as other:
        first = pool.submit(join, 0)
        told = shared.get()
        other.connect((_HOST, int.from_bytes(told[16:])))
        if stranger == "resets":
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
            other.close()
        shared.put(told)
        second = join(1)
        links = first.result()
    for each in (links, second):
        each.leave()
    while not second.has_ended:
        second.wait(1.0)
    assert links.lost is second.lost is None
    for each in (links, second):
        each.close()
