"""Pages of a KV cache straight to a socket and from it, without a copy in user space on either
side: in C where the extension was built (_wire.c), else in Python, with the same bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_transfer.errors import LinkClosed

try:
    from kv_transfer import _wire as compiled
except ImportError:  # installed where there was no C compiler
    compiled = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.memory import KvRegion
    from kv_transfer.transport.base import Wire

_IOV_MAX = 512
_READS_NOTHING = "the peer reads nothing"
_CLOSED = "the peer closed the link inside a chunk"


def send_pieces(sock: socket.socket, pieces: Sequence[memoryview], flags: int = 0) -> int:
    """As `send_pages`, of pieces that lie anywhere."""
    rest, total = list(pieces), 0
    at = 0
    while at < len(rest):
        try:
            sent = sock.sendmsg(rest[at : at + _IOV_MAX], [], flags)
        except BlockingIOError as error:
            if flags & socket.MSG_DONTWAIT:
                break
            raise LinkClosed(_READS_NOTHING) from error
        at = _advance(rest, at, sent)
        total += sent
    return total


def send_in_python(
    sock: socket.socket, head: bytes, region: KvRegion, block_ids: list[int], flags: int
) -> int:
    """See `send_pages`."""
    return send_pieces(sock, [memoryview(head), *region.pages(block_ids)], flags)


def send_in_c(
    sock: socket.socket, head: bytes, region: KvRegion, block_ids: list[int], flags: int
) -> int:
    """See `send_pages`."""
    where, g = region.pages_at(block_ids), region.geometry
    try:
        return compiled.send_pages(sock.fileno(), head, flags, *where, g.num_layers, g.page_bytes)
    except BlockingIOError as error:
        raise LinkClosed(_READS_NOTHING) from error


def receive_in_python(wire: Wire, region: KvRegion, block_ids: list[int]) -> None:
    """See `receive_pages`."""
    receive_all(wire, region.pages(block_ids))


def receive_in_c(wire: Wire, region: KvRegion, block_ids: list[int]) -> None:
    """See `receive_pages`."""
    where, g = region.pages_at(block_ids), region.geometry
    size = region.size_bytes(len(block_ids))
    ahead = wire.take_ahead(size)
    if compiled.receive_pages(wire.sock.fileno(), ahead, *where, g.num_layers, g.page_bytes) < size:
        raise LinkClosed(_CLOSED)


def receive_all(wire: Wire, pieces: Sequence[memoryview]) -> None:
    """Fills the pieces in order."""
    rest, sock = list(pieces), wire.sock
    at = 0
    ahead = wire.take_ahead(sum(piece.nbytes for piece in rest))
    while ahead:
        count = min(rest[at].nbytes, len(ahead))
        rest[at][:count], ahead = ahead[:count], ahead[count:]
        at = _advance(rest, at, count)
    while at < len(rest):
        # MSG_WAITALL: else a call, with all its vectors, would bring only what is there already.
        got = sock.recvmsg_into(rest[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
        if not got:
            raise LinkClosed(_CLOSED)
        at = _advance(rest, at, got)


def left(pieces: Sequence[memoryview], sent: int) -> bytes:
    """A copy of what is left of them when so many bytes went."""
    rest = list(pieces)
    return b"".join(rest[_advance(rest, 0, sent) :])


def _advance(pieces: list[memoryview], at: int, count: int) -> int:
    while count:
        size = pieces[at].nbytes
        if count < size:
            pieces[at] = pieces[at][count:]
            return at
        count -= size
        at += 1
    return at


Send = Callable[[socket.socket, bytes, "KvRegion", list[int], int], int]
Receive = Callable[["Wire", "KvRegion", list[int]], None]

# Sends the head and the pages of the blocks, layer by layer; returns when the kernel has every
# byte, or, with MSG_DONTWAIT among the flags, when it takes no more: how many bytes went. Raises
# LinkClosed, and KvTransferError where an id is no block.
send_pages: Send = send_in_python if compiled is None else send_in_c
# Fills the pages of the blocks, layer by layer. Raises as `send_pages`.
receive_pages: Receive = receive_in_python if compiled is None else receive_in_c
