"""KV over NCCL: a producer and a consumer with a GPU each, over a fake NCCL and a real socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kv_transfer.cache.geometry import PagePart
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.messages import ChunkReady, Heartbeat, Inner, KvMessage
from kv_transfer.protocol.transport import LocalKv, TransportUnavailable
from kv_transfer.settings import WINDOW, ConnectorConfig
from kv_transfer.transport.nccl import transport as module
from kv_transfer.transport.nccl.binding import Result
from kv_transfer.transport.nccl.communicators import Communicators
from kv_transfer.transport.nccl.limits import RECEIVER, SENDER, Limits, limits_from
from kv_transfer.transport.nccl.link_ends import NcclConsumer, NcclProducer
from kv_transfer.transport.nccl.staging import until as poll
from kv_transfer.transport.nccl.transport import NcclTransport
from tests.support.fake_nccl import Fabric, FakeGpu, FakeLink, FakeNccl
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_transfer.cache.host_memory import BlockCopy

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 12, 2, 4, 8
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT
WHOLE = PagePart(0, 0, 0, HEADS * TOKENS * CONTENT, 0, 0, LAYERS)
# A sender's end has room for two, and one receiver's.
ONE_PAIR = sum(Limits().communicator_bytes(rank) for rank in (SENDER, RECEIVER))
TWO_SENDERS = ONE_PAIR + Limits().communicator_bytes(SENDER)
LIMITS = Limits(TWO_SENDERS, slots=2, slot_bytes=2 * BLOCK_BYTES, init_s=5.0, op_s=5.0, keep_s=0.0)
DIRECT = replace(LIMITS, min_direct_bytes=BLOCK_BYTES)
FROM, TO = [7, 2, 9, 0, 5], [1, 11, 3, 4, 8]


class Pair:
    """Both ends of a link, each with a reader thread."""

    def __init__(self, world: World) -> None:
        self.links = [FakeLink(sock) for sock in socket.socketpair()]
        links: Any = self.links
        offer = world.producer.offer(world.caches[0])
        assert offer is not None
        consumer, details = world.consumer.consumer(world.caches[1], offer, links[1])
        producer = world.producer.producer(world.caches[0], details, links[0])
        assert isinstance(producer, NcclProducer)
        assert isinstance(consumer, NcclConsumer)
        self.producer, self.consumer = producer, consumer
        self.received: queue.Queue[BaseException | None] = queue.Queue()
        self.targets: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()  # of each chunk
        self.others: list[KvMessage] = []  # messages that are not the transport's
        self.begun = 0  # chunks that the consumer has begun to receive
        self.threads = [
            threading.Thread(target=self._read_producer, daemon=True),
            threading.Thread(target=self._read_consumer, daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _read_producer(self) -> None:
        with suppress(KvTransferError, OSError):
            while True:
                message = self.links[0].read()
                assert isinstance(message, Inner)
                self.producer.on_inner(message.body)
        self.links[0].close()

    def _read_consumer(self) -> None:
        copies: deque[BlockCopy] = deque()
        try:
            while True:
                while copies and not self.links[1].has_input(0.001):
                    self._end(copies)
                message = self.links[1].read()
                if isinstance(message, ChunkReady):
                    ids = self.targets.get()
                    part = None if ids is None else WHOLE
                    copies.append(self.consumer.receive(message, ids, part))
                    self.begun += 1
                elif isinstance(message, Inner):
                    self.consumer.on_inner(message.body)
                else:
                    self.others.append(message)
        except (KvTransferError, OSError) as error:
            for copy in copies:  # none of them goes on
                with suppress(KvTransferError):
                    copy.wait()
            self.received.put(error)
        self.links[1].close()

    def _end(self, copies: deque[BlockCopy]) -> None:
        while copies and copies[0].has_ended:
            copies.popleft().wait()
            self.received.put(None)

    def begin(self, source: list[int] = FROM, target: list[int] | None = TO) -> BlockCopy:
        """Begin to push, and close the producer's end if that fails."""
        self.targets.put(target)
        try:
            size = len(source) * BLOCK_BYTES
            return self.producer.send(ChunkReady("t", 0, len(source), size), source, WHOLE)
        except BaseException:
            self.links[0].close()
            raise

    def push(self, source: list[int] = FROM, target: list[int] | None = TO) -> None:
        """Push, and close the producer's end if that fails."""
        copy = self.begin(source, target)
        try:
            copy.wait()
        except BaseException:
            self.links[0].close()
            raise

    def move(self, source: list[int] = FROM, target: list[int] | None = TO) -> None:
        """Push, and wait until the consumer has received the chunk."""
        self.push(source, target)
        error = self.received.get(timeout=WAIT_S)
        if error is not None:
            raise error

    def fails(self, reason: str, source: list[int] = FROM) -> None:
        """Assert that one end fails for this reason, and the other because the link ends."""
        with pytest.raises(KvTransferError) as pushed:
            self.push(source, TO[: len(source)])
        received = self.received.get(timeout=WAIT_S)
        assert received is not None
        assert reason in f"{pushed.value} | {received}"

    def close(self) -> None:
        for link in self.links:
            link.close()
        for thread in self.threads:
            thread.join(WAIT_S)
        self.producer.close()
        self.consumer.close()
        for link in self.links:
            link.sock.close()


class World:
    """A prefill and a decode process, and the links between them."""

    def __init__(
        self, limits: Limits = LIMITS, across_layers: tuple[bool, bool] = (False, False)
    ) -> None:
        self.fabric = Fabric()
        self.nccls = FakeNccl(self.fabric), FakeNccl(self.fabric)
        self.gpus = FakeGpu(self.nccls[0], "GPU-0"), FakeGpu(self.nccls[1], "GPU-1")
        self.memory = [
            # In the layout BLHNC, or LBHNC.
            memory.transpose(0, 1).contiguous().transpose(0, 1) if is_across else memory
            for memory, is_across in zip(map(self._memory, (1, 2)), across_layers, strict=True)
        ]
        self.caches = [
            LocalKv({0: gpu.own(device_region(list(memory), BLOCKS))}, None)
            for gpu, memory in zip(self.gpus, self.memory, strict=True)
        ]
        self.producer = NcclTransport(self.nccls[0], self.gpus[0], limits)
        self.consumer = NcclTransport(self.nccls[1], self.gpus[1], limits)
        self.pairs: list[Pair] = []

    def _memory(self, seed: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(seed)
        shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=dice)

    def pair(self) -> Pair:
        self.pairs.append(Pair(self))
        return self.pairs[-1]

    def is_exact(self) -> bool:
        want = self._memory(2)
        want[:, TO] = self.memory[0][:, FROM]
        return torch.equal(self.memory[1], want)

    def slots(self, transport: NcclTransport) -> list[tuple[int, int]]:
        return [(s.free, s.lost) for s in transport._staging.values()]

    def close(self) -> None:
        for pair in self.pairs:
            pair.close()
        assert not [comm for each in self.nccls for comm in each.live]
        for transport in (self.producer, self.consumer):
            assert len(transport._communicators) == 0
            for staging in transport._staging.values():
                assert staging.free + staging.lost == staging.count


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def until(condition: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_chunk_is_one_send_per_slot_regardless_of_layers(world: World) -> None:
    """5 blocks of 3 layers, 2 blocks a slot; the communicator is made on demand."""
    pair = world.pair()
    assert not world.nccls[0].live
    pair.move()
    assert world.is_exact()
    assert world.fabric.posts.count(0) == world.fabric.posts.count(1) == 3
    pair.move()
    assert len(world.nccls[0].comms) == 1  # one serves many chunks
    assert world.nccls[0].max_ctas == world.nccls[1].max_ctas == [LIMITS.max_ctas]


def test_nothing_is_posted_before_the_other_end_posts_too(world: World) -> None:
    """The receiver posts before the sender; fake_nccl.py refuses every other order."""
    pair = world.pair()
    pair.consumer.communicator.in_use.acquire()  # the consumer does not get to its answer
    pushing = threading.Thread(target=pair.push, daemon=True)
    pushing.start()
    until(lambda: world.nccls[0].live)
    assert world.fabric.posts == []
    pair.consumer.communicator.in_use.release()
    pushing.join(WAIT_S)
    assert sorted(world.fabric.posts) == [0, 0, 0, 1, 1, 1]


def test_bytes_are_sent_once_they_are_gathered_and_received_once_they_are_scattered(
    world: World,
) -> None:
    pair = world.pair()
    before = world.memory[1].clone()
    producer, consumer = world.gpus
    producer.copies_left = 0
    pushing = threading.Thread(target=pair.push, args=[FROM[:2], TO[:2]], daemon=True)
    pushing.start()
    until(lambda: world.fabric.posts == [1, 0])
    world.fabric.run()
    assert all(comm.moves for each in world.nccls for comm in each.live)
    consumer.copies_left = 0
    producer.copies_left = 1
    pushing.join(WAIT_S)
    assert pair.received.empty()
    assert torch.equal(world.memory[1], before)
    consumer.copies_left = 1
    assert pair.received.get(timeout=WAIT_S) is None
    assert torch.equal(world.memory[1][:, TO[:2]], world.memory[0][:, FROM[:2]])


def test_parts_of_a_chunk_are_gathered_sent_and_scattered_at_the_same_time() -> None:
    """The first part is in place while the second is still being gathered."""
    world = World(replace(LIMITS, part_bytes=BLOCK_BYTES))
    world.fabric.is_strict = False
    pair = world.pair()
    world.gpus[0].copies_left = 1
    pushing = threading.Thread(target=pair.push, args=[FROM[:2], TO[:2]], daemon=True)
    pushing.start()
    until(lambda: torch.equal(world.memory[1][:, TO[0]], world.memory[0][:, FROM[0]]))
    assert not torch.equal(world.memory[1][:, TO[1]], world.memory[0][:, FROM[1]])
    world.gpus[0].copies_left = 1
    pushing.join(WAIT_S)
    assert pair.received.get(timeout=WAIT_S) is None
    assert torch.equal(world.memory[1][:, TO[1]], world.memory[0][:, FROM[1]])
    world.close()


@pytest.mark.parametrize("target", [TO, None])
def test_blocks_that_are_one_run_of_bytes_go_without_staging(target: list[int] | None) -> None:
    """vLLM's layouts with the block outermost, which the connector asks for."""
    world = World(replace(DIRECT, max_group=2), across_layers=(True, True))
    world.fabric.is_strict = False
    before = world.memory[1].clone()
    world.gpus[0].copies_left = world.gpus[1].copies_left = 0
    world.pair().move(target=target)
    assert world.is_exact() if target else torch.equal(world.memory[1], before)
    assert sum(world.fabric.groups) == 2 * len(FROM)
    assert max(world.fabric.groups) == 2
    world.close()


@pytest.mark.parametrize("target", [TO, None])
def test_blocks_without_staging_are_one_group_although_a_slot_holds_fewer(
    target: list[int] | None,
) -> None:
    world = World(DIRECT, across_layers=(True, True))
    pair = world.pair()
    before = world.memory[1].clone()
    pair.move(target=target)
    assert world.is_exact() if target else torch.equal(world.memory[1], before)
    assert world.fabric.groups == [len(FROM)] * 2
    world.close()


def test_a_consumer_of_version_0_1_gets_one_offer_of_a_slot_at_a_time() -> None:
    world = World(DIRECT, across_layers=(True, True))
    offer = world.producer.offer(world.caches[0])
    assert offer is not None
    sockets = socket.socketpair()
    links: list[Any] = [FakeLink(sock) for sock in sockets]
    consumer, details = world.consumer.consumer(world.caches[1], offer, links[1])
    assert details.pop("direct_run") == DIRECT.max_group
    assert details.pop("window") == WINDOW
    producer = world.producer.producer(world.caches[0], details, links[0])
    assert isinstance(producer, NcclProducer)
    assert producer._direct_run == DIRECT.slot_bytes // BLOCK_BYTES
    assert (producer._window, producer.send_chunks) == (1, 1)
    for wrong in ("two", 0):
        with pytest.raises(ProtocolError, match="is not a number of offers"):
            world.producer.producer(world.caches[0], details | {"window": wrong}, links[0])
    for end in (consumer, producer, *sockets):
        end.close()
    world.close()


@pytest.mark.parametrize("across_layers", [(True, False), (True, True)], ids=["unlike", "short"])
def test_blocks_that_lie_otherwise_at_the_other_end_or_are_short_are_staged(
    across_layers: tuple[bool, bool],
) -> None:
    limits = replace(LIMITS, min_direct_bytes=BLOCK_BYTES + all(across_layers))
    world = World(limits, across_layers=across_layers)
    world.pair().move()
    assert world.is_exact()
    assert max(world.fabric.groups) == 1
    world.close()


def test_blocks_into_which_nccl_writes_are_not_given_away_before_the_gpu_rests() -> None:
    world = World(replace(DIRECT, quarantine_s=0.0), across_layers=(True, True))
    pair = world.pair()
    world.fabric.is_held = True
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(pair.push)
        until(lambda: 0 in world.fabric.posts)
        world.gpus[1].is_stuck = True
        pair.links[1].close()
        assert isinstance(pushed.exception(WAIT_S), KvTransferError)
    until(lambda: not world.nccls[1].live)
    assert pair.received.empty()
    world.gpus[1].is_stuck = False
    assert pair.received.get(timeout=WAIT_S) is not None
    world.close()


def test_a_new_link_joins_before_its_first_chunk(world: World) -> None:
    pair = world.pair()
    pair.producer.open()
    assert len(world.nccls[0].live) == len(world.nccls[1].live) == 1
    pair.move()
    assert world.is_exact()
    assert len(world.nccls[0].comms) == 1


def test_an_offer_takes_no_memory(world: World) -> None:
    """The consumer may prefer another transport."""
    offer = world.producer.offer(world.caches[0])
    assert offer is not None
    assert world.producer.usage().held_bytes == 0
    world.pair().move()
    assert world.producer._staging[SENDER].slot_bytes == offer["slot_bytes"]


def test_a_chunk_of_a_cancelled_transfer_is_discarded(world: World) -> None:
    before = world.memory[1].clone()
    world.pair().move(target=None)
    assert torch.equal(world.memory[1], before)


@pytest.mark.parametrize("what", ["joins", "is_held"])
def test_each_wait_has_a_deadline(what: str) -> None:
    """The ranks never join, or the bytes never move."""
    world = World(replace(LIMITS, init_s=0.05, op_s=0.05, min_move_s=0.05))
    setattr(world.fabric, what, what == "is_held")
    pair = world.pair()
    pair.fails("took longer than")
    assert world.producer.usage().totals["nccl_aborted"] == 1
    setattr(world.fabric, what, what != "is_held")
    again = world.pair()  # the next link works
    again.move()
    assert world.is_exact()
    world.close()


def test_an_error_of_nccl_fails_the_link_and_the_next_one_works(world: World) -> None:
    pair = world.pair()
    pair.move()
    world.fabric.error = Result.REMOTE_ERROR
    pair.fails("REMOTE_ERROR: as the test wanted")
    world.fabric.error = None
    world.pair().move()
    assert world.is_exact()


@pytest.mark.parametrize("end", [0, 1])
def test_an_end_that_dies_in_mid_chunk_is_aborted_at_once(world: World, end: int) -> None:
    pair = world.pair()
    world.fabric.is_held = True
    failed: list[BaseException] = []

    def push() -> None:
        try:
            pair.push()
        except KvTransferError as error:
            failed.append(error)

    pushing = threading.Thread(target=push, daemon=True)
    pushing.start()
    until(lambda: sorted(world.fabric.posts) == [0, 0, 1, 1])  # as many as there are slots
    pair.links[end].close()
    pushing.join(WAIT_S)
    assert failed
    assert pair.received.get(timeout=WAIT_S) is not None
    assert not world.nccls[0].live
    assert not world.nccls[1].live
    assert world.slots(world.producer) == world.slots(world.consumer) == [(2, 0)]


def test_chunks_are_in_flight_together_and_the_next_is_posted_before_the_last_has_ended(
    world: World,
) -> None:
    pair = world.pair()
    pair.move(FROM[:2], TO[:2])
    del world.fabric.posts[:]
    world.fabric.is_held = True
    first = pair.begin(FROM[2:4], TO[2:4])
    until(lambda: pair.begun == 2)
    second = pair.begin(FROM[4:], TO[4:])
    until(lambda: not second.has_ended and sorted(world.fabric.posts) == [0, 0, 1, 1])
    assert not first.has_ended
    assert pair.received.empty()
    world.fabric.is_held = False
    for copy in (first, second):
        copy.wait()
        assert pair.received.get(timeout=WAIT_S) is None
    assert world.is_exact()
    assert world.slots(world.producer) == world.slots(world.consumer) == [(2, 0)]


class Unanswered:
    """A pair with two offers whose answers wait until `deliver`. It has a communicator."""

    def __init__(
        self,
        world: World,
        sources: Sequence[list[int]] = (FROM[2:4], FROM[4:]),
        targets: Sequence[list[int] | None] = (TO[2:4], TO[4:]),
    ) -> None:
        self.pair = world.pair()
        self.pair.move(FROM[:2], TO[:2])
        self.post, self.waiting = self.pair.links[1].post, deque[KvMessage]()
        self.pair.links[1].post = self.waiting.append  # type: ignore[method-assign]
        self.copies = [self.begin(*each) for each in zip(sources, targets, strict=True)]

    def begin(self, source: list[int], target: list[int] | None) -> BlockCopy:
        begun = self.pair.begun
        copy = self.pair.begin(source, target)
        until(lambda: self.pair.begun == begun + 1)
        return copy

    def deliver(self) -> None:
        self.pair.links[1].post = self.post  # type: ignore[method-assign]
        while self.waiting:
            self.post(self.waiting.popleft())

    def finish(self) -> None:
        for copy in self.copies:
            copy.wait()
            assert self.pair.received.get(timeout=WAIT_S) is None


def test_the_next_offer_does_not_wait_for_the_answer_to_the_last() -> None:
    world = World(replace(LIMITS, slots=WINDOW + 2))
    waiting = Unanswered(world)
    assert world.fabric.posts == [1, 0, 1, 1], "the receives are posted, and no send"
    waiting.deliver()
    waiting.finish()
    assert world.fabric.posts == [1, 0, 1, 1, 0, 0]
    assert world.is_exact()
    world.close()


def test_offers_without_an_answer_hold_no_more_slots_than_the_window() -> None:
    """Else a few congested decode workers would stop the sends to all others."""
    world = World(replace(LIMITS, slots=WINDOW + 1, budget_bytes=Limits().budget_bytes))
    waiting = Unanswered(world)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(waiting.pair.push, FROM[:2], TO[:2])
        world.pair().move(FROM[:2], TO[:2])
        assert world.slots(world.producer) == [(1, 0)]
        assert not third.done()
        waiting.deliver()
        third.result(WAIT_S)
    assert waiting.pair.received.get(timeout=WAIT_S) is None
    waiting.finish()
    assert world.is_exact()
    world.close()


@pytest.mark.parametrize("end", [0, 1])
def test_an_end_that_dies_before_it_answers_leaves_nothing(end: int) -> None:
    world = World(replace(LIMITS, slots=WINDOW + 1))
    waiting = Unanswered(world)
    waiting.pair.links[end].close()
    for copy in waiting.copies:
        with pytest.raises(KvTransferError):
            copy.wait()
    until(lambda: not any(each.live for each in world.nccls))
    until(lambda: world.slots(world.producer) == world.slots(world.consumer) == [(3, 0)])
    world.close()


def test_a_chunk_that_is_cancelled_before_its_answer_is_discarded() -> None:
    world = World(replace(LIMITS, slots=WINDOW + 2))
    waiting = Unanswered(world, [FROM[2:4], FROM[:2]], [TO[2:4], None])
    waiting.deliver()
    waiting.finish()
    waiting.pair.move(FROM[4:], TO[4:])
    assert world.is_exact()
    world.close()


@pytest.mark.parametrize("is_staged", [True, False])
def test_all_offers_that_the_consumer_has_not_read_when_it_frees_its_end_are_made_again(
    is_staged: bool,
) -> None:
    """What lies between them is handled in its order."""
    limits = replace(LIMITS if is_staged else DIRECT, slots=WINDOW + 1)
    world = World(limits, across_layers=(True, True))
    pair = world.pair()
    pair.move(FROM[:2], TO[:2])
    with pair.consumer.communicator.in_use:
        first = pair.begin(FROM[2:4], TO[2:4])
        pair.links[0].write(Heartbeat("t"))
        second = pair.begin(FROM[4:], TO[4:])
        pair.consumer.communicator.retire()
        assert not pair.others
    for copy in (first, second):
        copy.wait()
        assert pair.received.get(timeout=WAIT_S) is None
    assert pair.others == [Heartbeat("t")]
    assert world.is_exact()
    assert len(world.nccls[0].comms) == 2
    assert world.slots(world.producer) == world.slots(world.consumer) == [(3, 0)]
    world.close()


def test_a_message_inside_a_chunk_ends_the_link(world: World) -> None:
    pair = world.pair()
    pair.move(FROM[:2], TO[:2])
    pair.targets.put(TO[:2])
    pair.links[0].write(ChunkReady("t", 0, 2, 2 * BLOCK_BYTES))
    pair.links[0].write(Heartbeat("t"))
    assert "a Heartbeat message inside a chunk" in str(pair.received.get(timeout=WAIT_S))


def test_a_short_wait_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transport.nccl.staging.SPIN_S", WAIT_S)
    answers = iter([False, False, True])
    poll(lambda: next(answers), WAIT_S, "", lambda: None, nap=pytest.fail)


def test_an_error_ends_all_chunks_in_flight(world: World) -> None:
    pair = world.pair()
    pair.move(FROM[:2], TO[:2])
    world.fabric.is_held = True
    first = pair.begin(FROM[2:4], TO[2:4])
    until(lambda: pair.begun == 2)
    second = pair.begin(FROM[4:], TO[4:])
    world.fabric.error = Result.REMOTE_ERROR
    for copy in (first, second):
        with pytest.raises(KvTransferError, match="REMOTE_ERROR"):
            copy.wait()
    received = pair.received.get(timeout=WAIT_S)
    assert received is not None
    assert "REMOTE_ERROR" in str(received)
    assert world.producer.usage().totals["nccl_aborted"] == 1
    assert world.slots(world.producer) == world.slots(world.consumer) == [(2, 0)]


def test_who_waits_for_an_offer_frees_the_slots_of_what_has_arrived(world: World) -> None:
    """The producer may wait for a slot that another link holds as long as we hold ours."""
    pair = world.pair()
    pair.move(FROM[:2], TO[:2])
    world.fabric.is_held = True
    copy = pair.begin(FROM[:2], TO[:2])
    until(lambda: pair.begun == 2)
    pair.targets.put(TO[:1])
    pair.links[0].write(ChunkReady("t", 0, 1, BLOCK_BYTES))  # and no offer behind it
    until(lambda: not pair.links[1].has_input())
    assert world.slots(world.consumer) == [(1, 0)]
    world.fabric.is_held = False
    copy.wait()
    until(lambda: world.slots(world.consumer) == [(2, 0)])


def test_a_communicator_is_not_freed_while_chunks_are_in_flight(world: World) -> None:
    pair = world.pair()
    pair.move(FROM[:2], TO[:2])
    world.fabric.is_held = True
    copy = pair.begin(FROM[:2], TO[:2])
    until(lambda: pair.begun == 2)
    for end in (pair.producer, pair.consumer):
        assert not end.communicator.in_use.acquire(blocking=False)
    world.fabric.is_held = False
    copy.wait()
    assert pair.received.get(timeout=WAIT_S) is None
    for end in (pair.producer, pair.consumer):
        assert end.communicator.in_use.acquire(blocking=False)
        end.communicator.in_use.release()


def test_a_gpu_that_does_not_come_to_rest_costs_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(replace(LIMITS, quarantine_s=0.05))
    pair = world.pair()
    pair.move()
    world.fabric.error = Result.INTERNAL_ERROR
    monkeypatch.setattr(
        pair.producer.communicator, "abort", lambda: setattr(world.gpus[0], "is_stuck", True)
    )
    pair.fails("the GPU's rest took longer than", FROM[:2])
    assert world.producer.usage().lost_slots == 1
    monkeypatch.undo()
    world.fabric.error, world.gpus[0].is_stuck = None, False
    world.pair().move()  # over the slot that is left
    assert world.is_exact()
    world.close()


def test_the_least_recently_used_communicator_is_evicted(world: World) -> None:
    world.consumer._communicators._limits = Limits()
    first, second, third = (world.pair() for _ in range(3))
    for pair in (first, second, first, third):
        pair.move()
    assert len(world.nccls[0].live) == 2
    assert world.producer.usage().totals["nccl_evicted"] == 1
    until(lambda: not second.consumer.communicator.is_open)  # the peer was told
    second.move()  # and a new communicator serves the link that lost its own
    assert world.is_exact()


def test_a_communicator_in_use_is_not_ended_for_another() -> None:
    limits = Limits(ONE_PAIR, slots=2, slot_bytes=2 * BLOCK_BYTES, op_s=0.1)
    world = World(limits)
    busy, other = world.pair(), world.pair()
    busy.move()
    with busy.producer.communicator.in_use:
        staging = world.producer._staging[SENDER]
        staging.slot = None  # type: ignore[assignment, method-assign] # who waits takes none
        other.fails("room for a communicator took longer")
        del staging.slot
    busy.move()
    world.close()


def test_no_slot_is_held_while_the_consumer_waits_for_room() -> None:
    """Else a few congested decode workers would stop the sends to all others."""
    limits = replace(LIMITS, slots=1, keep_s=3600.0)
    world = World(limits)
    room = world.consumer._communicators
    room._limits = replace(limits, budget_bytes=ONE_PAIR)
    pair, waiting = world.pair(), world.pair()
    pair.move()
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(waiting.move)
        until(lambda: room.has_waiting(RECEIVER))
        pair.move()
        assert not moved.done()
        room._limits = replace(room._limits, keep_s=0.0)
        moved.result(WAIT_S)
    assert world.is_exact()
    world.close()


def test_a_link_that_is_never_idle_leaves_its_room_after_its_turn() -> None:
    world = World(replace(LIMITS, budget_bytes=ONE_PAIR))
    busy, other = world.pair(), world.pair()
    part = FROM[:2], TO[:2]
    busy.begin(*part)
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(other.move)
        while not moved.done():
            last = busy.begin(*part)  # while the one before is in flight
        moved.result()
    last.wait()
    assert world.is_exact()
    world.close()


def test_a_communicator_is_kept_from_the_time_of_its_last_byte(world: World) -> None:
    """On a slow network, bytes are in NCCL's buffers when the send has ended."""
    pair = world.pair()
    copy = pair.begin()
    begun = time.monotonic()
    copy.wait()
    assert world.producer._communicators._open[pair.producer.communicator] > begun


def test_who_waits_for_an_offer_leaves_its_room_to_another_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The producer may wait for the room of that link's producer, which waits for our room."""
    world = World(replace(LIMITS, budget_bytes=ONE_PAIR))
    pair, other = world.pair(), world.pair()
    pair.move()
    chunk, write = ChunkReady("t", 0, 2, 2 * BLOCK_BYTES), pair.links[0].write
    pair.targets.put(TO[:2])
    write(chunk)  # and no offer behind it
    until(lambda: not pair.links[1].has_input())
    other.move()
    monkeypatch.setattr(pair.links[0], "write", lambda x: x == chunk or write(x))
    pair.move(FROM[:2], TO[:2])
    assert world.is_exact()
    world.close()


def test_an_offer_over_a_communicator_that_the_consumer_has_freed_is_made_again(
    world: World,
) -> None:
    pair = world.pair()
    pair.move()
    with pair.producer.communicator.in_use:  # it learns of it in the middle of its next push
        with pair.consumer.communicator.in_use:
            pair.consumer.communicator.retire()
        until(lambda: pair.producer._answers)
    pair.move()
    assert world.is_exact()
    assert len(world.nccls[0].comms) == 2


def test_pairs_that_nccl_cannot_join_use_the_next_transport(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Any = FakeLink(socket.socket())
    offer = world.producer.offer(world.caches[0])
    assert offer is not None
    for change, match in (
        ({"version": 22907}, "NCCL 23007 here and 22907 there"),
        ({"gpu": "GPU-1"}, "both workers use GPU GPU-1"),
        ({"slot_bytes": BLOCK_BYTES - 1}, "holds no block"),
        ({"slot_bytes": "many"}, "not NCCL's"),
        ({"environment": {"NCCL_PROTO": "Simple"}}, "NCCL_PROTO is unset here and Simple there"),
    ):
        with pytest.raises(TransportUnavailable, match=match):
            world.consumer.consumer(world.caches[1], offer | change, link)
    monkeypatch.setenv(module.ONE_GPU_VARIABLE, "1")
    world.consumer.consumer(world.caches[1], offer | {"gpu": "GPU-1"}, link)
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    with pytest.raises(TransportUnavailable, match="NCCL_PROTO is Simple here and unset there"):
        world.consumer.consumer(world.caches[1], offer, link)
    world.consumer.consumer(world.caches[1], world.producer.offer(world.caches[0]) or {}, link)
    link.sock.close()


class Idle:
    """A link's end that NCCL never sees. `in_use` is free."""

    def __init__(self, rank: int, pool: Communicators) -> None:
        self.rank, self.in_use, self.pool = rank, threading.Lock(), pool
        pool.add(self)  # type: ignore[arg-type]

    def check(self) -> None:
        pass

    def retire(self) -> None:
        self.pool.leave(self)  # type: ignore[arg-type]

    def enter(self) -> None:
        self.pool.enter(self)  # type: ignore[arg-type]


def test_a_process_has_room_for_as_many_as_its_own_ends_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A decode worker's 512 MiB hold 12 ends that receive, and room to send once."""
    pool = Communicators(replace(Limits(), keep_s=0.0))
    for _ in range(12):
        Idle(RECEIVER, pool).enter()
    assert (len(pool), pool.evicted, caplog.text) == (12, 0, "")
    Idle(SENDER, pool).enter()
    assert (len(pool), pool.evicted) == (13, 0)
    Idle(RECEIVER, pool).enter()
    assert (len(pool), pool.evicted) == (13, 1)
    assert f"worker.kv.nccl_budget_bytes to {(13 * 40 + 8) << 20} or more" in caplog.text


def test_links_that_take_turns_keep_a_communicator_for_a_while() -> None:
    """Else each request would close the communicator that the next one needs."""
    limits = replace(Limits(ONE_PAIR), keep_s=3600.0, op_s=0.05)
    pool = Communicators(limits)
    first, second = Idle(SENDER, pool), Idle(SENDER, pool)
    first.enter()
    with pytest.raises(KvTransferError, match="room for a communicator"):
        second.enter()
    pool._limits = replace(limits, keep_s=0.02)  # now it has been used, or waited for, that long
    second.enter()
    assert pool.evicted == 1


def test_senders_leave_room_for_a_receiver_which_they_may_wait_for() -> None:
    pool = Communicators(replace(Limits(ONE_PAIR), op_s=0.01))
    sending = Idle(SENDER, pool)
    sending.enter()
    sending.in_use.acquire()
    with pytest.raises(KvTransferError, match="room for a communicator"):
        Idle(SENDER, pool).enter()
    Idle(RECEIVER, pool).enter()
    assert len(pool) == 2


def test_the_settings_bound_what_nccl_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_from(ConnectorConfig(nccl_budget_bytes=100 << 20, nccl_max_ctas=2))
    assert (limits.budget_bytes, limits.max_ctas) == (100 << 20, 2)
    with pytest.raises(ValueError, match="nccl_budget_bytes"):
        limits_from(ConnectorConfig(nccl_budget_bytes=1 << 20))
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    assert limits_from(ConnectorConfig()).max_ctas == 16
    with pytest.raises(ValueError, match="of 16 thread blocks"):
        limits_from(ConnectorConfig(nccl_budget_bytes=100 << 20))
