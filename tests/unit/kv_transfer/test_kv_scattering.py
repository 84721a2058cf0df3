"""The two ways to send and receive pages carry the same bytes, whatever pieces they come in."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import scattering
from kv_transfer.errors import KvTransferError, LinkClosed
from kv_transfer.scattering import (
    left,
    receive_in_c,
    receive_in_python,
    receive_pages,
    send_in_c,
    send_in_python,
    send_pages,
)
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import Cache, geometry
from tests.unit.kv_transfer.test_kv_pushes import wire_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.scattering import Receive, Send
    from kv_transfer.transport.base import Wire

COMPILED = pytest.mark.skipif(
    scattering.compiled is None, reason="the extension was not built: no C compiler at install"
)
SENDS = [pytest.param(send_in_python, id="python"), pytest.param(send_in_c, id="c", marks=COMPILED)]
RECEIVES = [
    pytest.param(receive_in_python, id="python"),
    pytest.param(receive_in_c, id="c", marks=COMPILED),
]
HEAD = b"what comes before"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        for end in (first, second):
            end.settimeout(None)
        yield first, second


def wire(sock: socket.socket, ahead: bytes = b"") -> Wire:
    """Of a link that has read so much of it already."""
    left_over = memoryview(ahead)

    def take_ahead(limit: int) -> memoryview:
        nonlocal left_over
        taken, left_over = left_over[:limit], left_over[limit:]
        return taken

    return replace(wire_of(sock, []), take_ahead=take_ahead)


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("receive", RECEIVES)
@given(data=st.data(), page=st.sampled_from([1, 40, 64, 4096]), inside=st.booleans())
def test_pages_arrive_where_they_are_wanted_and_nowhere_else(
    send: Send, receive: Receive, data: Any, page: int, inside: bool
) -> None:
    shape = geometry(layers=3, blocks=12, page=page, layers_inside=inside, gap=0)
    ours, theirs = Cache(shape, seed=1), Cache(shape, seed=2)
    block = st.integers(0, 11)
    to = data.draw(st.lists(block, unique=True, max_size=12))
    # In a row they are one piece of memory.
    source = data.draw(
        st.one_of(
            st.lists(block, min_size=len(to), max_size=len(to)),
            st.just(list(range(len(to)))),
        )
    )
    want = list(ours.blocks())
    for s, d in zip(source, to, strict=True):
        want[d] = theirs.block(s)
    size = ours.region.size_bytes(len(to))
    ahead = data.draw(st.integers(0, min(size, 4096)))
    first, second = socket.socketpair()
    with first, second:
        sending = threading.Thread(target=send, args=[first, HEAD, theirs.region, source, 0])
        sending.start()
        before = second.recv(len(HEAD) + ahead, socket.MSG_WAITALL)
        receive(wire(second, before[len(HEAD) :]), ours.region, to)
        sending.join(WAIT_S)
        assert not sending.is_alive()
        first.close()
        assert second.recv(1) == b""
    assert before[: len(HEAD)] == HEAD
    assert ours.blocks() == want


@pytest.mark.parametrize("send", SENDS)
def test_without_waiting_so_much_goes_as_there_is_room_for(
    send: Send, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, second = ends
    cache = Cache(geometry(layers=1, blocks=16, page=256 << 10), seed=1)
    blocks = list(range(16))[::-1]
    pieces = [memoryview(HEAD), *cache.region.pages(blocks)]
    sent = send(first, HEAD, cache.region, blocks, socket.MSG_DONTWAIT)
    assert 0 < sent < len(HEAD) + cache.region.size_bytes(16)
    assert send(first, HEAD, cache.region, blocks, socket.MSG_DONTWAIT) == 0
    came = second.recv(sent, socket.MSG_WAITALL)
    assert came + left(pieces, sent) == b"".join(pieces)


@pytest.mark.parametrize("send", SENDS)
def test_a_peer_that_reads_nothing_ends_a_send_that_waits(
    send: Send, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, _ = ends
    first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 20_000))
    cache = Cache(geometry(layers=1, blocks=16, page=256 << 10), seed=1)
    with pytest.raises(LinkClosed, match="reads nothing"):
        send(first, HEAD, cache.region, list(range(16)), 0)


@pytest.mark.parametrize("receive", RECEIVES)
@pytest.mark.parametrize("came", [0, 100])
def test_a_peer_that_closes_inside_a_chunk_ends_the_link(
    receive: Receive, came: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, second = ends
    first.sendall(bytes(came))
    first.close()
    with pytest.raises(LinkClosed, match="inside a chunk"):
        receive(wire(second), Cache(geometry(), seed=1).region, [3, 1])


@pytest.mark.parametrize("block", [-1, 24])
def test_nothing_outside_the_cache_is_sent_or_written(
    block: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = Cache(geometry(), seed=1)
    before = cache.snapshot()
    with pytest.raises(KvTransferError, match="outside"):
        send_pages(ends[0], HEAD, cache.region, [0, block], 0)
    ends[0].close()
    with pytest.raises(KvTransferError, match="outside"):
        receive_pages(wire(ends[1]), cache.region, [0, block])
    assert ends[1].recv(1) == b""
    assert cache.snapshot() == before


@COMPILED
def test_the_compiled_ways_are_the_ones_in_use() -> None:
    assert (send_pages, receive_pages) == (send_in_c, receive_in_c)
