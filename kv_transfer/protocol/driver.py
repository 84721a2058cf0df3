"""The state machines of a worker's transfers, and the one method that drives them.

`Producer` and `Consumer` decide, without I/O. `Driver.drive` locks, lets them decide, queues their
actions on the links, and sends them after releasing the lock. One lock guards both machines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.consumer import Consumer, ReceiveFailed
from kv_transfer.protocol.link import Sending
from kv_transfer.protocol.messages import ChunkReady, Send
from kv_transfer.protocol.producer import DigestBlocks, Producer, Release, SendChunk
from kv_transfer.protocol.transport import source_of
from kv_transfer.settings import MAX_IN_FLIGHT
from pdserve.process.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kv_transfer.protocol.consumer import Received
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.plan import CopyPlan
    from kv_transfer.protocol.producer import Action
    from kv_transfer.protocol.transport import LocalKv
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)

# Deadline for a running copy after its link was closed: only memory bandwidth limits it then.
COPY_END_S = 30.0


@dataclass(slots=True)
class TransferCounters:
    """Totals since the worker started."""

    pushed_bytes: int = 0
    pushed_blocks: int = 0
    push_s: float = 0.0
    received_bytes: int = 0
    digest_s: float = 0.0  # of the producer
    failures: int = 0
    downgrades: int = 0  # links to producers over a slower transport, see Link.downgrade
    dropped_links: int = 0  # connections that failed the handshake or violated the protocol


class Driver:
    """Both state machines, under `lock`. `wakeup` is set while results wait for `take_results`.

    `undigested` has the ids of transfers that may have blocks to digest; None ends the digest
    thread.
    """

    def __init__(self, settings: ConnectorConfig, local: LocalKv, plan: CopyPlan) -> None:
        self.lock = threading.Lock()
        self.local = local
        self.counters = TransferCounters()
        self.wakeup = Wakeup()
        self.undigested: SimpleQueue[str | None] = SimpleQueue()
        self.is_closing = False
        self._broken: BaseException | None = None
        # Copies between host memories, over TCP or shared memory, have no other check.
        one_in = 1 if local.is_host else settings.digest_one_in
        self.consumer: Consumer[Link] = Consumer(settings.receive_timeout_s, one_in)
        self.producer: Producer[Link] = Producer(
            plan=plan,
            chunk_blocks={
                group: max(1, settings.chunk_bytes // region.geometry.block_bytes)
                for group, region in local.regions.items()
            },
            hold_s=settings.hold_s,
            heartbeat_s=settings.receive_timeout_s / 4,
            digest_one_in=one_in,
        )
        self._preempt_timeout_s = settings.preempt_timeout_s
        self._released: set[str] = set()
        # Releases that wait until the messages of the same decision are written on these links.
        self._releasing: list[tuple[set[Link], set[str]]] = []
        self._copy_ended = threading.Condition(self.lock)
        self._queued: set[Link] = set()  # links with items queued since the last `_flush`

    # -- any thread

    def drive(self, decide: Callable[[float], Iterable[Action[Link]]]) -> None:
        """Let the state machines decide under the lock, then send what they decided.

        `decide` gets the monotonic time, calls the machines, and returns their actions. It must not
        block.
        """
        with self.lock:
            is_queued = self._queue(decide(time.monotonic()))
        if is_queued:  # else an engine that takes results would send items of another thread
            self._flush()

    def start_thread(self, name: str, loop: Callable[[], None]) -> threading.Thread:
        """Start a thread that no link owns. If it fails, blocks are no longer freed, so the next
        step raises its error, which ends the engine."""

        def run() -> None:
            try:
                self.local.memory.enter_thread()
                loop()
            except Exception as error:
                logger.exception("the thread %s failed", name)
                self._broken = error
                self.wakeup.set()  # an idle engine, too

        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread

    def write(self, link: Link) -> None:
        """Writer thread: send the link's queued items, waiting for the peer."""
        with link.stream.writing:
            try:
                self._write_queued(link, may_wait=True)
            finally:
                while link.queue.sending:  # after an error
                    with contextlib.suppress(OSError, KvTransferError):
                        self._end_send(link)
        self._flush()

    def fail_link(self, link: Link, error: Exception) -> None:
        """Close a link because of an error of one of its threads."""
        if not isinstance(error, OSError | KvTransferError):
            logger.error("KV link to %s failed", link.peer, exc_info=error)
        link.is_blamed |= isinstance(error, ProtocolError)
        self.drop_link(link, str(error) or type(error).__name__)

    def drop_link(self, link: Link, reason: str) -> None:
        """Close a link and fail its transfers. Idempotent."""
        if not link.close(reason):
            return
        with self.lock:
            is_unknown = not link.is_dialled and link.producer is None
            self.counters.dropped_links += is_unknown or (link.is_blamed and not link.is_dialled)
            self._queue(self.producer.link_down(link))
            self._queue(self.consumer.link_down(link, reason))
            links, self._queued = self._queued, set()
        if not self.is_closing:
            logger.info("KV link to %s closed: %s", link.peer, reason)
        # Not `_flush`, which drops links itself and would recurse deeply with many links.
        for each in links:
            each.queue.wake()

    # -- for the engine's step

    def take_results(self) -> tuple[set[str], list[Received | ReceiveFailed]]:
        """Apply timeouts. Return the ids of requests whose blocks the engine may free, and the
        outcomes of its loads, each once. Raises KvTransferError if a thread failed."""
        if self._broken is not None:
            raise KvTransferError(f"KV transfers have failed: {self._broken}") from self._broken
        self.drive(lambda now: [*self.producer.tick(now), *self.consumer.tick(now)])
        with self.lock:
            stuck = self.consumer.stuck_links(time.monotonic())
        for link in stuck:
            # The reader waits for the rest of a chunk, perhaps of a stopped producer.
            self.drop_link(link, f"a chunk took {self.consumer.receive_timeout_s:g} s")
        with self.lock:
            self.wakeup.clear()
            released, self._released = self._released, set()
            outcomes = self.consumer.take_outcomes()
            for outcome in outcomes:
                if isinstance(outcome, ReceiveFailed):
                    self.counters.failures += 1
                else:
                    self.counters.received_bytes += outcome.report.bytes
            return released, outcomes

    def take_received(self) -> list[Received]:
        """Return the successful loads since the last call, on any thread. `take_results` returns
        them, too."""
        with self.lock:
            return self.consumer.take_received()

    def wait_for_copies(self, transfer_ids: Sequence[str]) -> None:
        """Wait until no copy reads these transfers' blocks. They are sent again from the first one,
        so where every block has a digest no answer depends on this wait.

        After `preempt_timeout_s` the links of running copies are closed. Raises KvTransferError if
        a copy does not end even then.
        """

        def running() -> list[Link]:
            return [link for name in transfer_ids for link in self.producer.copying(name)]

        with self.lock:
            if self._copy_ended.wait_for(lambda: not running(), self._preempt_timeout_s):
                return
            late = running()
        for link in late:
            self.drop_link(link, "the engine needs the blocks")
        with self.lock:
            if not self._copy_ended.wait_for(lambda: not running(), COPY_END_S):
                raise KvTransferError(f"a copy of preempted blocks did not end in {COPY_END_S:g} s")

    def close(self) -> None:
        """Release the wake-up. Call it after every link was dropped. Idempotent."""
        self.wakeup.close()

    # -- inside

    def _queue(self, actions: Iterable[Action[Link]]) -> bool:
        """Queue actions on their links. The caller holds the lock, and calls `_flush` or wakes the
        writers if this returns True."""
        links: set[Link] = set()
        releases: set[str] = set()
        for action in actions:
            if isinstance(action, Release):
                releases.add(action.request_id)
            elif isinstance(action, DigestBlocks):
                self.undigested.put(action.transfer_id)
            else:
                action.link.queue.put(action.message if isinstance(action, Send) else action)
                links.add(action.link)
        self._queued |= links
        if releases:
            self._releasing.append((links, releases))
        self._show_results()
        return bool(links)

    def _show_results(self) -> None:
        """Let the engine take outcomes, and releases whose messages are written. The caller holds
        the lock."""
        for waiting in list(self._releasing):
            links, releases = waiting
            if not any(map(_is_unwritten, links)):
                self._releasing.remove(waiting)
                self._released |= releases
        if self._released or self.consumer.has_outcomes:
            self.wakeup.set()

    def _flush(self) -> None:
        """Send queued items without blocking; writer threads send the rest. Sending here is faster
        than waking a thread."""
        while True:
            with self.lock:
                links, self._queued = self._queued, set()
                if not links:
                    self._show_results()
                    return
            for link in links:
                if link.transport and link.stream.writing.acquire(blocking=False):
                    try:
                        self._write_queued(link, may_wait=False)
                    except (OSError, KvTransferError) as error:
                        self.fail_link(link, error)
                    finally:
                        link.stream.writing.release()
                if link.has_items:
                    link.queue.wake()

    def _write_queued(self, link: Link, *, may_wait: bool) -> None:
        """Send queued items in order. The caller holds the stream's `writing`, and then calls
        `_flush`."""
        while (item := link.queue.take()) is not None or link.queue.sending:
            if item is None:
                link.stream.write_pieces([])
                self._end_send(link)
            elif not isinstance(item, SendChunk):
                link.stream.buffer(item)
            elif may_wait or (link.producer is not None and link.producer.is_quick):
                self._send_chunk(link, item)
            else:
                link.queue.put_back(item)
                break
        # One write, so that the peer's reader wakes once: a short transfer is one chunk and
        # TransferDone.
        if may_wait:
            link.stream.write_pieces([])
        else:
            link.stream.send_buffered()

    def _send_chunk(self, link: Link, chunk: SendChunk[Link]) -> None:
        """Send a chunk, unless its transfer was closed or rewound meanwhile."""
        channel = link.producer
        if channel is None:
            raise KvTransferError("this end of the link receives")
        with self.lock:
            if not self.producer.begin_copy(chunk):
                return
        begun = time.monotonic()
        try:
            region = source_of(self.local.regions, chunk.part)
            size = region.size_bytes(len(chunk.block_ids))
            message = ChunkReady(chunk.transfer_id, chunk.first, len(chunk.block_ids), size)
            copy = channel.send(message, chunk.block_ids, chunk.part)
            has_ended = not link.queue.sending and copy.has_ended
        except BaseException:
            self._record_send(chunk, begun, 0)
            raise
        if has_ended:
            self._record_send(chunk, begun, size)
            return
        link.queue.sending.append(Sending(chunk, copy, begun, size))
        with self.lock:
            self._queue(self.producer.next_chunk(chunk, time.monotonic()))
        while len(link.queue.sending) >= MAX_IN_FLIGHT:
            self._end_send(link)

    def _end_send(self, link: Link) -> None:
        """Wait until the link's oldest chunk is sent."""
        queue = link.queue
        chunk, copy, begun, size = queue.sending.popleft()
        try:
            copy.wait()
        except BaseException:
            self._record_send(chunk, begun, 0)
            raise
        ended = self._record_send(chunk, begun, size)
        # Overlapping sends are counted once.
        queue.sending = deque(x._replace(begun=max(x.begun, ended)) for x in queue.sending)

    def _record_send(self, chunk: SendChunk[Link], begun: float, sent_bytes: int) -> float:
        """Record the end of a copy, which failed if `sent_bytes` is 0. Return the current time."""
        now = time.monotonic()
        with self.lock:
            self._queue(self.producer.end_copy(chunk, now, now - begun, sent_bytes))
            self._copy_ended.notify_all()
            if sent_bytes:
                self.counters.pushed_bytes += sent_bytes
                self.counters.pushed_blocks += len(chunk.block_ids)
                self.counters.push_s += now - begun
        return now


def _is_unwritten(link: Link) -> bool:
    """Return True if a consumer that copies by itself may not have been sent all messages yet. It
    must read of the end of a transfer before the blocks are written again, because its last copy
    may still read them."""
    copies = link.producer is not None and link.producer.is_quick
    return copies and not link.is_down and (link.has_items or link.stream.writing.locked())
