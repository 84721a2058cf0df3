"""Chunks that a GPU still copies, or digests, while the thread that began them goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.cache.geometry import KvGeometry, KvGroup, PagePart
from kv_transfer.cache.host_memory import DIGEST_BYTES
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.consumer import Consumer, Received, ReceiveFailed
from kv_transfer.protocol.driver import TransferCounters
from kv_transfer.protocol.link_threads import _digest, _Receiving
from kv_transfer.protocol.messages import ChunkReady, GroupBlocks, Subscribe, TransferDone
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.producer import Producer
from kv_transfer.settings import MAX_IN_FLIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PAGE, BLOCKS = 64, 8


@dataclass
class Copy:
    """A copy that ends when it is waited for, or when `has_ended` is set."""

    digests: bytes
    waits: list[int]
    number: int
    error: Exception | None = None
    has_ended: bool = False

    def wait(self) -> bytes:
        self.waits.append(self.number)
        if self.error is not None:
            raise self.error
        return self.digests


@dataclass
class Channel:
    copies: list[Copy] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    most: int = 0  # in flight at once

    def receive(self, chunk: ChunkReady, block_ids: Any, part: Any, checked: Any = None) -> Copy:
        digest = bytes([chunk.first]) * DIGEST_BYTES * chunk.count
        self.copies.append(Copy(digest, self.waits, len(self.copies)))
        self.most = max(self.most, len(self.copies) - len(self.waits))
        return self.copies[-1]


class Driver:
    """What `_Receiving` uses of a driver: the consumer under its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.local: Any = self
        self.regions = {0: self}
        self.geometry = KvGeometry(1, BLOCKS, PAGE, BLOCKS * PAGE, PAGE)
        self.consumer: Consumer[str] = Consumer(10.0)

        plan = CopyPlan((Shard(1, PAGE, KvGroup(0, 1), (1,)),))
        self.memory = self
        self.producer = Producer[str](plan=plan, chunk_blocks={0: 1}, hold_s=30.0, heartbeat_s=5.0)
        self.counters = TransferCounters()
        self.undigested: SimpleQueue[str | None] = SimpleQueue()
        self.is_closing = False
        self.digesting = Channel()

    def enter_thread(self) -> None: ...

    def begin_digests(self, block_ids: list[int], checked: range | None) -> Copy:
        (block,) = block_ids
        return self.digesting.receive(ChunkReady("t", block, 1, PAGE), block_ids, None)

    def narrowed(self, layers: range, start: int, size: int) -> Driver:
        return self

    def size_bytes(self, blocks: int) -> int:
        return PAGE * blocks

    def drive(self, decide: Callable[[float], Iterable[Any]]) -> None:
        decide(0.0)


@pytest.fixture
def driver() -> Driver:
    made = Driver()
    blocks = GroupBlocks(0, 0, list(range(BLOCKS)), [0, 1, 0], [0, 1, 0])
    subscription = Subscribe("t", BLOCKS, [blocks], 1)
    made.consumer.subscribe("r", [("link", subscription, [PagePart(0, 0, 0, PAGE, 0, 0, 1)])], 0.0)
    return made


def begin(receiving: _Receiving, channel: Channel, *firsts: int) -> None:
    for first in firsts:
        receiving.begin(channel, ChunkReady("t", first, 1, PAGE))  # type: ignore[arg-type]


def test_chunks_are_in_flight_together_and_end_in_order(driver: Driver) -> None:
    receiving, channel = _Receiving("link", driver), Channel()  # type: ignore[arg-type]
    begin(receiving, channel, *range(MAX_IN_FLIGHT))
    assert channel.waits == []
    begin(receiving, channel, MAX_IN_FLIGHT)
    assert channel.waits == [0]
    channel.copies[1].has_ended = channel.copies[2].has_ended = True
    begin(receiving, channel, MAX_IN_FLIGHT + 1)
    assert channel.waits == [0, 1, 2]
    begin(receiving, channel, *range(MAX_IN_FLIGHT + 2, BLOCKS))
    receiving.finish()
    assert channel.waits == list(range(BLOCKS))
    assert channel.most == MAX_IN_FLIGHT
    digests = b"".join(bytes([n]) * DIGEST_BYTES for n in range(BLOCKS))
    done = TransferDone("t", [1], digests, 0.0, 0.0)
    driver.consumer.done("link", done, "cuda_ipc", is_pull=True)
    (outcome,) = driver.consumer.take_outcomes()
    assert isinstance(outcome, Received)
    assert outcome.report.blocks == BLOCKS


class Input:
    """A link from whose producer nothing comes before the copies have ended."""

    def __init__(self, channel: Channel, *, is_pull: bool) -> None:
        self.consumer = self.stream = self
        self.is_pull, self.channel = is_pull, channel

    def has_input(self, wait_s: float) -> bool:
        assert (wait_s == 0) == self.is_pull
        ended = [copy.number for copy in self.channel.copies if copy.has_ended]
        if not self.is_pull:
            assert self.channel.waits == ended  # only those are waited for
        for copy in self.channel.copies[: len(ended) + 1]:
            copy.has_ended = True
        return False


@pytest.mark.parametrize("is_pull", [True, False])
def test_chunks_end_while_nothing_is_to_be_read(driver: Driver, is_pull: bool) -> None:
    channel = Channel()
    receiving = _Receiving(Input(channel, is_pull=is_pull), driver)  # type: ignore[arg-type]
    driver.consumer = Consumer(10.0)
    part = PagePart(0, 0, 0, PAGE, 0, 0, 1)
    blocks = GroupBlocks(0, 0, [0, 1, 2], [0, 1, 0], [0, 1, 0])
    link: Any = receiving._link
    driver.consumer.subscribe("r", [(link, Subscribe("t", 3, [blocks], 1), [part])], 0.0)
    begin(receiving, channel, 0, 1, 2)
    assert channel.waits == []
    receiving.finish_until_input()
    assert channel.waits == [0, 1, 2]


def test_a_chunk_that_is_sent_again_replaces_the_one_in_flight(driver: Driver) -> None:
    """After a preemption, the producer begins again at an earlier block."""
    receiving, channel = _Receiving("link", driver), Channel()  # type: ignore[arg-type]
    begin(receiving, channel, 0, 1, 0)
    channel.copies[0].digests = b"x" * DIGEST_BYTES
    receiving.finish()
    ((_, part),) = driver.consumer
    assert (part.received_blocks, part.digests) == (1, bytes(DIGEST_BYTES))


def test_blocks_are_given_back_only_when_no_copy_writes_to_them(driver: Driver) -> None:
    receiving, channel = _Receiving("link", driver), Channel()  # type: ignore[arg-type]
    begin(receiving, channel, 0, 1, 2)
    driver.consumer.link_down("link", "the producer is gone")
    assert not driver.consumer.has_outcomes
    channel.copies[1].error = KvTransferError("CUDA: the peer's memory is gone")
    receiving.abandon()
    assert channel.waits == [0, 1, 2]
    (outcome,) = driver.consumer.take_outcomes()
    assert isinstance(outcome, ReceiveFailed)
    assert outcome.reason == "the producer is gone"


def test_digests_are_in_flight_together_and_recorded_in_order(driver: Driver) -> None:
    producer, copies = driver.producer, driver.digesting.copies
    producer.expect("t", "r", 0.0)
    producer.progress("t", [list(range(BLOCKS))], BLOCKS, 0.0)
    driver.undigested.put("t")
    driver.undigested.put(None)
    _digest(driver)  # type: ignore[arg-type]
    assert driver.digesting.waits == list(range(BLOCKS))
    assert driver.digesting.most == MAX_IN_FLIGHT
    assert len(copies) == BLOCKS  # each block once
    assert producer.undigested("t") is None
    (transfer,) = producer
    ((_, digests),) = transfer.digests.items()
    assert digests.made == b"".join(bytes([n]) * DIGEST_BYTES for n in range(BLOCKS))


def test_digests_in_flight_at_a_preemption_are_dropped_and_made_again(driver: Driver) -> None:
    producer = driver.producer
    producer.expect("t", "r", 0.0)
    producer.progress("t", [[0, 1]], 2, 0.0)
    first = producer.undigested("t")
    assert first is not None
    producer.begin_digests(first)
    second = producer.undigested("t")
    assert second is not None
    assert second.block_ids == [1]
    producer.preempt("t")
    producer.begin_digests(second)
    producer.progress("t", [[5, 6]], 2, 0.0)
    producer.digested(first, bytes(DIGEST_BYTES), 0.0)
    again = producer.undigested("t")
    assert again is not None
    assert again.block_ids == [5]
