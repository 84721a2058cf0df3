"""What we ask of CUDA beside NCCL, as an interface: a fake fits under it."""

from __future__ import annotations

from typing import Protocol

from kv_transfer.errors import KvTransferError

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
