"""Lanes: the shortest way of an answer's tokens from a worker's frame to its client's socket.

A lane is a streamed answer whose events differ only in the text of one token. While it `takes` (the
response has begun, and neither it nor the connection has ended), `waits` (who reads the answer has
sent all that was there) and has `tokens`, the list of the ids of what went over it, a token needs
no Python: `pass_on` takes those of a whole frame. In C (_lanes.c); where that was not built there
are no lanes, and each token goes the longer way.

A lane writes to a connection's socket beside its transport, so only while the transport holds
nothing: it asks when `waits` or `tokens` was set, and after what it did not take or send whole. In
between nobody else may write. It must not take any more once `connection_lost` was called: the
descriptor is another connection's soon after. What the kernel has no room for goes through the
transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from pdserve._lanes import Lane

try:
    from pdserve import _lanes as compiled
except ImportError:  # installed where there was no C compiler
    compiled = None  # type: ignore[assignment]


def open_lane(transport: asyncio.Transport, before: bytes, after: bytes) -> Lane | None:
    """A lane for chunks of a body, of the JSON string of a text between `before` and `after`. It is
    still to be told that it takes, waits and has tokens. None where there can be none: with TLS the
    bytes are the transport's to encrypt."""
    if compiled is None or transport.get_extra_info("sslcontext") is not None:
        return None
    fd = transport.get_extra_info("socket").fileno()
    return compiled.Lane(fd, transport.get_write_buffer_size, transport.write, before, after)


def pass_on(
    lanes: dict[int, Lane],
    stream_ids: Sequence[int],
    token_ids: Sequence[int],
    texts: Sequence[str],
) -> Iterable[int]:
    """Sends each token whose stream has a lane that takes it. Returns the places of all others.
    Raises ValueError, with nothing sent, where there are not as many of each."""
    if not len(stream_ids) == len(token_ids) == len(texts):
        raise ValueError("as many tokens and texts as streams")
    places: Iterable[int] = range(len(stream_ids))
    return places if compiled is None else compiled.pass_on(lanes, stream_ids, token_ids, texts)
