"""What every transport promises.

A transport moves the bytes of granted blocks between two workers that share a link
(kv_transfer/link.py). Control messages always travel on the link; a transport only decides how the
payload of a chunk travels.

* A chunk moves whole pages, or the same `PagePart` of each where the two workers hold different
  heads (kv_transfer/protocol/plan.py); None means whole pages. Where the two ends' blocks
  differ in size it moves `chunk.tokens` tokens of them: out of blocks of one size, into the first
  places of blocks
  of the other.
* `SourceChannel.push` returns when the source's blocks may be overwritten. One chunk at a time, in
  order, on the link's writer thread; on other threads, an engine's among them, where it moves no
  more than `unwaited_bytes`, and then it must not wait for the peer. The ids come from a peer: one
  that is no block of its cache, or a part that is not in its pages, raises KvTransferError before
  anything is written.
* `TargetChannel.receive` runs on the link's reader thread, once a chunk, in the same order, and
  returns when the bytes are in place. With `block_ids` None the payload is consumed and thrown
  away. The caller has checked that `chunk.bytes` is what moves of `chunk.count` blocks, or of
  `chunk.tokens` tokens.
* `TargetChannel.idle` is asked after the link went down: True when nothing is, or ever will be,
  written to the target's memory over this link.
* `close` is idempotent and called once no push or receive runs.

Errors: OSError and KvTransferError end the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion, SharedMemory
    from kv_transfer.messages import Chunk, Message


class TransportUnavailable(KvTransferError):
    """The source cannot use this offer; the next one is tried. The message says why."""


@dataclass(frozen=True, slots=True)
class LocalKv:
    """This worker's KV cache. `shared` is None where the cache is not in shared memory."""

    region: KvRegion
    shared: SharedMemory | None


class SourceChannel(Protocol):
    """The sending end of one link. `unwaited_bytes`: a push of so many bytes, and of fewer, does
    not wait for the peer. Where it `makes_digests`, or tokens move, a chunk whose digest is
    DIGEST_DUE gets it from the push, which reads the bytes anyway; elsewhere none is pushed that
    has not got it."""

    name: str
    unwaited_bytes: int
    makes_digests: bool

    def push(
        self,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        """Sends the chunk's message and payload. Where tokens move, `skip` tokens of the first
        source block come before them."""
        ...

    def close(self) -> None:
        """Releases what the channel holds."""
        ...


class TargetChannel(Protocol):
    """The receiving end of one link."""

    name: str

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        """Puts the chunk's payload in place."""
        ...

    def idle(self) -> bool:
        """Whether the memory is safe from this link, for good."""
        ...

    def close(self) -> None:
        """Releases what the channel holds."""
        ...


@runtime_checkable
class Talks(Protocol):
    """A channel whose two ends have messages of their own."""

    def told(self, body: bytes) -> None:
        """The other end's, on the link's reader thread, when no `receive` runs: `receive` reads its
        own. Must not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """The link as a transport sees it. `send` is for a push alone: the bytes follow all that was
    sent before, soon. While a push runs nothing else is on its way, and until it has used `send` it
    may use the socket itself. Who receives from the socket itself must first `take_ahead` what the
    link has read of it already, so many bytes at most; it is valid until the next message is read.
    `has_more` says, during a push, whether something is to be sent right behind it."""

    sock: socket.socket
    send: Callable[[bytes], None]
    receive_into: Callable[[memoryview], None]
    take_ahead: Callable[[int], memoryview]
    has_more: Callable[[], bool]
    # For `receive`: the link's next message, and whether one begins within so many seconds.
    read: Callable[[], Message]
    can_read: Callable[[float], bool]
    # For any thread: sends a message before all that waits, behind what is being written now.
    post: Callable[[Message], None]
    # For any thread: True once the link has ended, and whoever waits for its peer must stop.
    is_down: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Account:
    """What a transport holds of its own beside the KV cache, on the same device, and what it has
    counted since it began, by name."""

    held_bytes: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Accounts(Protocol):
    """A transport that has something of its own to account for."""

    def account(self) -> Account:
        """At this moment; from any thread."""
        ...


class Transport(Protocol):
    """One way to move bytes, by name."""

    name: str

    @property
    def lost_slots(self) -> int:
        """Staging that may yet be written to, and is not given out again."""
        ...

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        """Target: what a source needs to use this transport here, or None where it cannot be used.
        `slot` is this link's number, never used twice."""
        ...

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        """Target: its end, once the source has chosen this transport."""
        ...

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        """Source: its end; raises TransportUnavailable."""
        ...

    def close(self) -> None:
        """Releases what the transport's channels have in common, when no link is left. Idempotent;
        where there is nothing, it does nothing."""
        ...
