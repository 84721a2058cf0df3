"""A connection between two workers: its messages, and its queue of items to write.

One thread reads (link_threads.py); one thread at a time writes (driver.py). Any thread may call
`post`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.errors import LinkClosed, ProtocolError
from kv_transfer.protocol.message_stream import MessageStream

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.messages import ChunkReady, KvMessage
    from kv_transfer.protocol.producer import SendChunk

# A consumer closes the link after this many seconds without a response of the producer's kernel.
# The kernel responds even if the process is busy, so this is much shorter than receive_timeout_s.
DEAD_PEER_S = 5


class Channel:
    """A transport's end of one link."""

    name: str

    def on_inner(self, body: bytes) -> None:
        """Handle an Inner message that arrived outside of `receive`. Must not block."""
        raise ProtocolError(f"{self.name} has no messages of its own")

    def close(self) -> None:
        """Release the resources of this end."""


class ProducerChannel(Channel):
    """The sending end."""

    # True if `send` neither copies nor waits, so that any thread may call it.
    is_quick = False
    # One `send` takes up to so many times `chunk_bytes`.
    send_chunks = 1

    def open(self) -> None:
        """Do slow preparations before the first chunk. Called on the link's writer thread when the
        first subscription arrives, because a link that only cancels needs none."""

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> BlockCopy:
        """Announce the chunk and send the blocks, `part` of each page, or start to.

        The blocks may be overwritten once the returned copy has ended. If the consumer copies by
        itself, it has ended at once; if the blocks change during the consumer's copy, the digests
        do not match. Nothing is being sent if this raises.
        """
        raise NotImplementedError


class ConsumerChannel(Channel):
    """The receiving end."""

    # True if `receive` copies from the producer's memory when the chunk is announced. The producer
    # does not wait for it, so it may have announced later chunks already.
    is_pull = False

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        """Write the chunk into these blocks, or start to. With None, discard it. Only digests at
        the positions `checked` are required.

        Runs on the link's reader thread, which waits for the returned copies in order. No write is
        in progress if this raises.
        """
        raise NotImplementedError


class Sending(NamedTuple):
    """A chunk that is being sent. `begun`: start of the copy. `size`: in bytes."""

    chunk: SendChunk[Link]
    copy: BlockCopy
    begun: float
    size: int


class WriteQueue:
    """What a link has to write, until it is closed. The writer thread sleeps on it."""

    def __init__(self) -> None:
        self.reason = ""  # why it was closed
        self.is_closed = False
        self.sending: deque[Sending] = deque()  # oldest first; for the thread that writes
        self._items: deque[KvMessage | SendChunk[Link]] = deque()
        self._opening: bool | None = None  # None: no subscription has arrived
        self._changed = threading.Condition()

    @property
    def has_items(self) -> bool:
        return bool(self._items)

    def put(self, item: KvMessage | SendChunk[Link]) -> None:
        """Add an item without waking the writer thread. Never blocks."""
        self._items.append(item)

    def put_back(self, item: KvMessage | SendChunk[Link]) -> None:
        self._items.appendleft(item)

    def take(self) -> KvMessage | SendChunk[Link] | None:
        """Return the next item. The caller holds the stream's `writing`."""
        return self._items.popleft() if self._items and not self.is_closed else None

    def request_opening(self) -> None:
        """Have the writer thread open the producer's channel, once."""
        if self._opening is None:
            self._opening = True
            self.wake()

    def take_opening(self) -> bool:
        """Writer thread: return True if the channel is to be opened, once."""
        if not self._opening:
            return False
        self._opening = False
        return True

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, has_unsent: Callable[[], bool]) -> bool:
        """Writer thread: return True when there is an item, a channel to open, or something
        unsent, and False when the queue is closed."""
        with self._changed:
            while not (self._items or has_unsent() or self._opening or self.is_closed):
                self._changed.wait()
            return not self.is_closed

    def close(self, reason: str) -> bool:
        """Wake the writer thread for the last time. Return False if it was closed already."""
        with self._changed:
            if self.is_closed:
                return False
            self.reason, self.is_closed = reason, True
            self._changed.notify_all()
            return True


class Link:
    """One connection. The handshake sets `producer` or `consumer`, this end's channel."""

    def __init__(self, address: str, *, is_dialled: bool, handshake_timeout_s: float) -> None:
        self.peer_address = address
        self.is_dialled = is_dialled
        self.opened_at = time.monotonic()
        self.peer_instance_id = ""
        self.producer: ProducerChannel | None = None
        self.consumer: ConsumerChannel | None = None
        self.downgrade = ""  # slower transport in use, with the reason; "" if none
        self.is_blamed = False  # the peer violated the protocol
        self.is_over = False  # down, and its threads have ended
        self.thread: threading.Thread | None = None
        self.queue = WriteQueue()
        self._handshake_end = self.opened_at + handshake_timeout_s
        self._stream: MessageStream | None = None

    @property
    def transport(self) -> str:
        """Name of the negotiated transport; "" until the handshake completes."""
        channel = self.producer or self.consumer
        return "" if channel is None else channel.name

    @property
    def is_down(self) -> bool:
        return self.queue.is_closed

    @property
    def reason(self) -> str:
        """Why the link is down."""
        return self.queue.reason

    @property
    def peer(self) -> str:
        """Instance id of the other worker, or its address while the id is unknown."""
        return self.peer_instance_id or self.peer_address

    @property
    def stream(self) -> MessageStream:
        if self._stream is None:
            raise LinkClosed("the link is not connected")
        return self._stream

    def open(self, sock: socket.socket, send_timeout_s: float) -> None:
        """Attach a socket. The link ends if the peer reads nothing for `send_timeout_s`."""
        self._stream = MessageStream(sock, self._handshake_end)
        # A busy consumer may leave a producer's data unread for long. A producer always reads, so
        # the consumer can use the short limit.
        dead_peer_s = DEAD_PEER_S if self.is_dialled else int(send_timeout_s)
        self._stream.set_limits(dead_peer_s, send_timeout_s)
        if self.is_down:
            raise LinkClosed(self.reason)

    @property
    def is_worn(self) -> bool:
        """True if another link must replace this one, because its keys have encrypted enough."""
        return self._stream is not None and self._stream.is_worn

    @property
    def has_items(self) -> bool:
        """True if something is left to write."""
        return self.queue.has_items or self._has_unsent()

    def _has_unsent(self) -> bool:
        return self._stream is not None and self._stream.has_unsent

    def post(self, item: KvMessage | SendChunk[Link]) -> None:
        """Queue a message or a chunk for the writer thread. Never blocks."""
        self.queue.put(item)
        self.queue.wake()

    def wait_for_items(self) -> bool:
        """Writer thread: return True when there is something to do, False when the link is down."""
        return self.queue.wait(self._has_unsent)

    def has_peer_left(self) -> bool:
        """Reader thread: return True if the link is down or the peer has closed it, also while
        messages from before are unread."""
        return self.is_down or self.stream.has_peer_closed

    def close(self, reason: str) -> bool:
        """Mark the link as down and wake its threads. Return False if it was down already."""
        if not self.queue.close(reason):
            return False
        if self._stream is not None:
            self._stream.shut_down()
        return True

    def release(self) -> None:
        """Close channel and socket. Call it when no thread uses the link."""
        for channel in (self.producer, self.consumer):
            if channel is not None:
                channel.close()
        if self._stream is not None:
            self._stream.close()
