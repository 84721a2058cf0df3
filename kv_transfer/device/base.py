"""What transports ask of a GPU, as interfaces: fakes fit under them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.memory import KvRegion
    from kv_transfer.reshard import Span

Event = object


class StreamError(KvTransferError):
    """The device reported an error; what ran on it may or may not be over."""


class StreamOps(Protocol):
    """Streams and events of one device. None of the calls waits for the device. All raise
    StreamError."""

    def bind(self) -> None:
        """Makes the device the calling thread's."""
        ...

    def open_stream(self) -> int:
        """A stream of its own, which never waits for the default one."""
        ...

    def close_stream(self, stream: int) -> None:
        """Frees a stream; what still runs on it ends first, in the background."""
        ...

    def record(self, stream: int) -> Event:
        """An event behind all that is on the stream by now."""
        ...

    def query(self, event: Event) -> bool:
        """Whether the event has fired."""
        ...


class Mover(Protocol):
    """Copies blocks, or some `tokens` of them, counted from the first block's first, between a KV
    cache and staging memory, where they lie in one form, whatever the cache's strides. Neither call
    waits for the copy: the event fires when it is done. Both raise, having begun nothing,
    StreamError, and KvTransferError where an id is no block of the cache."""

    def gather(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> Event:
        """Blocks → staging; `tokens` None is all of them."""
        ...

    def scatter(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> Event:
        """Staging → blocks."""
        ...


class Device(StreamOps, Protocol):
    """One GPU."""

    # Equal in two processes for one and the same GPU alone.
    uuid: str

    def allocate(self, size_bytes: int) -> int:
        """Memory of the device by its address, outside of any allocator that others use, so that
        another process may map it. Raises StreamError."""
        ...

    def free(self, address: int) -> None:
        """Releases what `allocate` gave."""
        ...

    def mover(self, region: KvRegion) -> Mover:
        """For one KV cache. Raises UnsupportedLayout where the cache is not on this device."""
        ...


class SharingDevice(Device, Protocol):
    """One whose memory other processes of the host may map. All raise StreamError."""

    def copy(self, target: int, source: int, size_bytes: int) -> Event:
        """Begins a copy from memory of this process to any that it has mapped."""
        ...

    def export_memory(self, address: int) -> bytes:
        """By which another process maps what `allocate` gave."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Maps another process's memory; once a handle until `close_memory`."""
        ...

    def close_memory(self, address: int) -> None:
        """Unmaps it."""
        ...
