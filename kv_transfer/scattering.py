"""Pages of a KV cache straight to a socket and from it, without a copy in user space on either
side."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from kv_transfer.errors import LinkClosed

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


def send_pages(
    sock: socket.socket, head: bytes, region: KvRegion, block_ids: list[int], flags: int
) -> int:
    """Send the head and the pages of the blocks, layer by layer. Return the number of bytes sent:
    all of them, or with MSG_DONTWAIT as many as the kernel takes. Raises LinkClosed, and
    KvTransferError if an id is no block."""
    return send_pieces(sock, [memoryview(head), *region.pages(block_ids)], flags)


def receive_pages(wire: Wire, region: KvRegion, block_ids: list[int]) -> None:
    """Fill the pages of the blocks, layer by layer. Raises as `send_pages`."""
    receive_all(wire, region.pages(block_ids))


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
