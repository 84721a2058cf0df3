"""The threads of a worker's links: a reader and a writer for each link, and one for digests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kv_transfer.cache.host_memory import EndedCopy
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.messages import ChunkReady, Inner, Subscribe, TransferDone
from kv_transfer.protocol.transport import source_of, target_of
from kv_transfer.settings import INPUT_POLL_S, MAX_IN_FLIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.driver import Driver
    from kv_transfer.protocol.link import ConsumerChannel, Link
    from kv_transfer.protocol.messages import KvMessage
    from kv_transfer.protocol.producer import Action, Undigested

logger = logging.getLogger(__name__)


def start_reader(link: Link, driver: Driver, handshake: Callable[[], None]) -> None:
    """Start the link's reader thread, which does the handshake first and then starts the writer.
    Raises RuntimeError at the limit of threads."""
    thread = threading.Thread(
        target=_read, args=(link, driver, handshake), daemon=True, name="kv-link"
    )
    link.thread = thread
    thread.start()


def start_digester(driver: Driver) -> threading.Thread:
    """Start and return the digest thread. It computes digests while the blocks are sent. On the
    sending thread, each chunk would wait for its digests."""
    return driver.start_thread("kv-digest", lambda: _digest(driver))


def _read(link: Link, driver: Driver, handshake: Callable[[], None]) -> None:
    writer = threading.Thread(target=_write, args=(link, driver), daemon=True, name="kv-write")
    receiving = _Receiving(link, driver)
    try:
        driver.local.memory.enter_thread()
        handshake()
        writer.start()
        while not link.is_down:
            receiving.finish_until_input()
            _receive_next(link, driver, receiving)
    except Exception as error:  # noqa: BLE001 - top of the thread: it ends the link
        driver.fail_link(link, error)
    finally:
        driver.drop_link(link, "closed")
        receiving.abandon()
        if writer.ident is not None:
            writer.join()
        link.release()
        link.is_over = True


def _write(link: Link, driver: Driver) -> None:
    """Send queued items that the driver could not send without waiting."""
    try:
        driver.local.memory.enter_thread()
        while link.wait_for_items():
            if link.queue.take_opening() and link.producer is not None:
                with link.stream.writing:
                    link.producer.open()
            driver.write(link)
    except Exception as error:  # noqa: BLE001 - top of the thread: it ends the link
        driver.fail_link(link, error)


def _receive_next(link: Link, driver: Driver, receiving: _Receiving) -> None:
    """Handle the next message. If blocks may lack digests and the producer does not wait for our
    copies, handle the messages behind a TransferDone first: the producer reports that it gives up
    blocks before its engine reuses them."""
    consuming = link.consumer
    is_late = consuming is not None and consuming.is_pull and driver.consumer.digest_one_in > 1
    ended: list[KvMessage] = []
    while True:
        message = link.stream.read()
        if is_late and isinstance(message, TransferDone):
            receiving.finish()  # copies must end before messages behind this one are read
            ended.append(message)
        else:
            _receive(link, driver, receiving, message)
        if not (ended and link.stream.has_input()):
            break
    for message in ended:
        _receive(link, driver, receiving, message)


def _receive(link: Link, driver: Driver, receiving: _Receiving, message: KvMessage) -> None:
    """Handle one message of the peer."""
    producing, consuming = link.producer, link.consumer

    def decide(now: float) -> Iterable[Action[Link]]:
        if link.is_down:
            return []
        if consuming is None:
            chunks = 1 if producing is None else producing.send_chunks
            return driver.producer.on_message(link, message, now, chunks)
        return driver.consumer.on_message(
            link, message, now, consuming.name, is_pull=consuming.is_pull
        )

    if isinstance(message, Subscribe):
        link.queue.request_opening()

    if isinstance(message, Inner):
        channel = consuming or producing
        assert channel is not None, "the handshake is over"
        channel.on_inner(message.body)
    elif isinstance(message, ChunkReady) and consuming is not None:
        receiving.begin(consuming, message)
    else:
        receiving.finish()  # TransferDone follows its chunks
        driver.drive(decide)


class _Receiving:
    """The chunks of a link that are being written, oldest first. Used by its reader thread."""

    def __init__(self, link: Link, driver: Driver) -> None:
        self._link, self._driver = link, driver
        self._chunks: deque[tuple[ChunkReady, float, BlockCopy]] = deque()
        self._ended_at = 0.0

    def begin(self, channel: ConsumerChannel, chunk: ChunkReady) -> None:
        """Write a chunk into its blocks, or discard it. A GPU may still copy when this returns."""
        driver = self._driver
        with driver.lock:
            place = driver.consumer.begin_chunk(self._link, chunk)
        if place is None:
            channel.receive(chunk, None, None).wait()
            return
        begun = time.monotonic()
        try:
            while len(self._chunks) >= MAX_IN_FLIGHT:
                self._finish_one()
            region = target_of(driver.local.regions, place.part)
            if chunk.size != region.size_bytes(chunk.count):
                raise ProtocolError(f"{chunk.count} blocks are not {chunk.size} bytes")
            copy = channel.receive(chunk, place.block_ids, place.part, place.checked)
        except BaseException as error:
            self._abort(chunk, str(error))
            raise
        self._chunks.append((chunk, begun, copy))
        self._finish_ended()

    def finish_until_input(self) -> None:
        """Finish chunks, as they end, while there is no message to read."""
        consuming = self._link.consumer
        # A sending producer waits for our answers to its messages.
        wait_s = 0.0 if consuming is None or consuming.is_pull else INPUT_POLL_S
        while self._chunks and not self._link.stream.has_input(wait_s):
            if wait_s:
                self._finish_ended()
            else:
                self._finish_one()

    def _finish_ended(self) -> None:
        while self._chunks and self._chunks[0][2].has_ended:
            self._finish_one()

    def finish(self) -> None:
        """Wait until every chunk is written."""
        while self._chunks:
            self._finish_one()

    def abandon(self) -> None:
        """Wait until no chunk is being written, after an error."""
        while self._chunks:
            try:
                self._finish_one()
            except (OSError, KvTransferError) as error:
                logger.warning("a copy of KV failed: %s", error)
            except Exception:
                logger.exception("a copy of KV failed")

    def _finish_one(self) -> None:
        chunk, begun, copy = self._chunks.popleft()
        try:
            digests = copy.wait()
        except BaseException as error:
            self._abort(chunk, str(error))
            raise
        begun = max(begun, self._ended_at)  # overlapping copies are counted once

        def end(now: float) -> Iterable[Action[Link]]:
            self._ended_at = now
            return self._driver.consumer.end_chunk(self._link, chunk, now, now - begun, digests)

        self._driver.drive(end)

    def _abort(self, chunk: ChunkReady, reason: str) -> None:
        self._driver.drive(lambda _: self._driver.consumer.abort_chunk(self._link, chunk, reason))


def _digest(driver: Driver) -> None:
    in_flight: deque[tuple[Undigested[Link], float, BlockCopy]] = deque()
    ended_at = 0.0
    while (transfer_id := driver.undigested.get()) is not None:
        while not driver.is_closing and (begun := _begin_digests(driver, transfer_id)) is not None:
            in_flight.append(begun)
            while len(in_flight) == MAX_IN_FLIGHT or (in_flight and in_flight[0][2].has_ended):
                ended_at = _end_digests(driver, *in_flight.popleft(), ended_at)
        while in_flight:
            ended_at = _end_digests(driver, *in_flight.popleft(), ended_at)


def _begin_digests(
    driver: Driver, transfer_id: str
) -> tuple[Undigested[Link], float, BlockCopy] | None:
    """Start to compute the digests of at most one chunk. Return None if none are due."""
    with driver.lock:
        blocks = driver.producer.undigested(transfer_id)
        if blocks is None:
            return None
        driver.producer.begin_digests(blocks)
    begun = time.monotonic()
    digests: BlockCopy = EndedCopy(b"")
    try:
        region = source_of(driver.local.regions, blocks.part)
        digests = region.begin_digests(blocks.block_ids, blocks.checked)
    except Exception:
        logger.exception("cannot compute the digests of transfer %s", transfer_id)
    return blocks, begun, digests


def _end_digests(
    driver: Driver, blocks: Undigested[Link], begun: float, copy: BlockCopy, last: float
) -> float:
    """Wait for the digests of a chunk and record them. Return the current time."""
    digests = b""
    try:
        digests = copy.wait()
    except Exception:
        logger.exception("cannot compute the digests of transfer %s", blocks.transfer.transfer_id)
    ended = time.monotonic()

    def decide(now: float) -> Iterable[Action[Link]]:
        # Overlapping digests are counted once.
        driver.counters.digest_s += ended - max(begun, last)
        return driver.producer.digested(blocks, digests, now)

    driver.drive(decide)
    return ended
