"""Producer and consumer against each other, over a simulated link that keeps order and may break.

The world plays both engines, the threads of the links, and the memory. Each rule is one thing that
one thread could do next; hypothesis chooses the order. In a `pull` world the consumer copies when
it reads an announcement, by which time the producer's engine may have overwritten the blocks.

There are three groups: full attention, a window whose blocks the producer's engine gives away as
they leave it, and a state that each step overwrites.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kv_transfer.cache.geometry import GroupKind, KvGroup
from kv_transfer.protocol.consumer import Consumer, Received, ReceiveFailed
from kv_transfer.protocol.messages import (
    Cancel,
    ChunkReady,
    GroupBlocks,
    KvMessage,
    Send,
    Subscribe,
)
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.producer import Producer, Release, SendChunk
from kv_transfer.settings import MAX_IN_FLIGHT

if TYPE_CHECKING:
    from kv_transfer.protocol.producer import Action

BLOCK = 4
GROUPS = (
    KvGroup(0, BLOCK),
    KvGroup(2, BLOCK, GroupKind.WINDOW, reach=5),
    KvGroup(1, BLOCK, GroupKind.STATE),
)
LEASE_S, RECEIVE_S = 30.0, 60.0
MISHAPS = ("abort", "unneeded", "cancel", "break", "wait", "damage")
GARBAGE, DAMAGED = ("garbage", -1), ("damaged", -1)
Content = tuple[str | int, ...]


def digests_of(contents: list[Content]) -> bytes:
    return b"".join(zlib.crc32(repr(c).encode()).to_bytes(8, "little") for c in contents)


@dataclass(eq=False)
class SimLink:
    """The bytes held by the kernel and the two ends of a link."""

    to_producer: deque[KvMessage] = field(default_factory=deque)
    to_consumer: deque[tuple[KvMessage, list[Content]]] = field(default_factory=deque)
    queue: deque[KvMessage | SendChunk[SimLink]] = field(default_factory=deque)
    copying: deque[SendChunk[SimLink]] = field(default_factory=deque)
    producer_up: bool = True
    consumer_up: bool = True
    damages: int = 0  # so many of the next chunks arrive damaged


@dataclass(eq=False)
class Request:
    """One transfer as the two engines see it. Tokens are counted in whole blocks' places.
    `source_tables` are the producer's, by table; `target` is what is subscribed, by group."""

    tid: str
    tokens: int
    source_tables: list[list[int]]
    target: list[GroupBlocks]
    prefill: str = "new"
    ready: int = 0
    held: bool = False
    released: int = 0
    link: SimLink | None = None
    started: bool = False
    unneeded: bool = False
    outcomes: list[Received | ReceiveFailed] = field(default_factory=list)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.producer: Producer[SimLink] = Producer(
            plan=CopyPlan(tuple(Shard(1, 16, group, (1,)) for group in GROUPS)),
            chunk_blocks={0: 2, 1: 1, 2: 1},
            hold_s=LEASE_S,
            heartbeat_s=5.0,
        )
        self.consumer: Consumer[SimLink] = Consumer(RECEIVE_S)
        self.links: list[SimLink] = []
        self.requests: dict[str, Request] = {}
        self.source: dict[int, Content] = {}
        self.target: dict[int, Content] = {}
        self.next_block = 0
        self.is_pull = False
        self.is_wide = False  # a chunk that is sent is longer than one that is digested

    @initialize(is_pull=st.booleans(), is_wide=st.booleans())
    def begin(self, is_pull: bool, is_wide: bool) -> None:
        self.is_pull, self.is_wide = is_pull, is_wide

    # -- helpers

    def blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def pick(self, data: Any, choices: list[Request]) -> Request:
        return self.requests[data.draw(st.sampled_from([r.tid for r in choices]))]

    def where(self, **wanted: Any) -> list[Request]:
        found = self.requests.values()
        return [r for r in found if all(getattr(r, k) == v for k, v in wanted.items())]

    def link(self) -> SimLink:
        """Return the link that the consumer uses now, a new one if the last broke."""
        if not self.links or not self.links[-1].consumer_up:
            self.links.append(SimLink())
        return self.links[-1]

    def do_producer(self, actions: list[Action[SimLink]]) -> None:
        for action in actions:
            if isinstance(action, Release):
                self.release(self.requests[action.request_id.removeprefix("p-")])
            elif isinstance(action, Send):
                action.link.queue.append(action.message)
            elif isinstance(action, SendChunk):
                action.link.queue.append(action)

    def do_consumer(self, sends: list[Send[SimLink]]) -> None:
        for send in sends:
            if send.link.consumer_up:
                send.link.to_producer.append(send.message)
        for outcome in self.consumer.take_outcomes():
            request = self.requests[outcome.request_id.removeprefix("d-")]
            request.outcomes.append(outcome)
            assert request.started
            assert len(request.outcomes) == 1, "two outcomes"
            if isinstance(outcome, Received):
                assert outcome.token_ids == (len(request.tid), request.tokens)
                assert outcome.report.blocks == sum(len(g.block_ids) for g in request.target)
                for g in request.target:
                    for n, block in enumerate(g.block_ids, g.first_block):
                        want = self.content(request, GROUPS[g.group], n, request.tokens)
                        assert self.target[block] == want

    def release(self, request: Request) -> None:
        assert request.held, "a release of blocks that nobody held"
        request.released += 1
        assert request.released == 1, "released twice"
        copying = [chunk for link in self.links for chunk in link.copying]
        assert all(chunk.transfer_id != request.tid for chunk in copying), "released under a copy"
        self.overwrite(request)

    def overwrite(self, request: Request) -> None:
        """Free the blocks, so that other requests use them."""
        for table in request.source_tables:
            self.source |= dict.fromkeys(table, GARBAGE)

    def content(self, request: Request, group: KvGroup, n: int, ready: int) -> Content:
        """Return the content of the n-th block of a table after `ready` tokens."""
        if n not in group.needed(ready):
            return GARBAGE
        if group.kind is GroupKind.STATE:
            return (request.tid, group.table, ready)
        # A partial block is filled further by the next step.
        is_full = (n + 1) * BLOCK <= ready or ready == request.tokens
        return (request.tid, group.table, n) if is_full else GARBAGE

    def consumer_down(self, link: SimLink) -> None:
        link.consumer_up = False
        self.do_consumer(self.consumer.link_down(link, "down"))

    def producer_down(self, link: SimLink) -> None:
        link.producer_up = False
        link.queue.clear()
        self.do_producer(self.producer.link_down(link))

    def end_copy(self, link: SimLink, *, copied: bool) -> None:
        """Write a message, with its payload unless it is pulled."""
        chunk = link.copying.popleft()
        contents = [self.source.get(block, GARBAGE) for block in chunk.block_ids]
        if copied and link.producer_up:
            message = ChunkReady(
                chunk.transfer_id,
                chunk.first,
                len(contents),
                len(contents),
                chunk.block_ids,
            )
            link.to_consumer.append((message, contents))
        self.do_producer(self.producer.end_copy(chunk, self.now, 0.1, int(copied)))
        if not copied and link.producer_up:
            self.producer_down(link)

    # -- the engines

    @rule(tokens=st.integers(1, 23), cached=st.integers(0, 2), start=st.booleans())
    @precondition(lambda self: len(self.requests) < 4)
    def arrive(self, tokens: int, cached: int, start: bool) -> None:
        tid = "t" * (len(self.requests) + 1)
        count = -(-tokens // BLOCK)
        first = min(cached, count - 1)
        target = []
        for n, group in enumerate(GROUPS):
            needed = group.needed(tokens)
            start = max(needed.start, first)
            target.append(
                GroupBlocks(n, start, self.blocks(needed.stop - start), [0, 1, 0], [0, 1, 0])
            )
        self.requests[tid] = Request(tid, tokens, [self.blocks(count) for _ in GROUPS], target)
        if start:
            self.start_now(self.requests[tid])

    @rule(data=st.data())
    @precondition(lambda self: self.where(prefill="new"))
    def expect(self, data: Any) -> None:
        request = self.pick(data, self.where(prefill="new"))
        request.prefill = "running"
        self.do_producer(self.producer.expect(request.tid, "p-" + request.tid, self.now))

    @rule(data=st.data(), step=st.integers(1, 9))
    @precondition(lambda self: self.where(prefill="running"))
    def compute(self, data: Any, step: int) -> None:
        request = self.pick(data, self.where(prefill="running"))
        self.progress(request, min(request.tokens, request.ready + step))

    def progress(self, request: Request, ready: int) -> None:
        request.ready = ready
        tables = [table[: -(-ready // BLOCK)] for table in request.source_tables]
        for group in GROUPS:
            for n, block in enumerate(tables[group.table]):
                self.source[block] = self.content(request, group, n, ready)
        self.do_producer(self.producer.progress(request.tid, tables, ready, self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.where(prefill="running"))
    def preempt(self, data: Any) -> None:
        request = self.pick(data, self.where(prefill="running"))
        self.producer.preempt(request.tid)
        self.overwrite(request)  # copies may still read the blocks
        request.source_tables = [self.blocks(len(table)) for table in request.source_tables]
        request.ready = 0

    @rule(data=st.data())
    @precondition(lambda self: self.where(prefill="running"))
    def finish(self, data: Any) -> None:
        self.finish_now(self.pick(data, self.where(prefill="running")), held=True)

    def finish_now(self, request: Request, *, held: bool) -> None:
        if held:
            self.progress(request, request.tokens)
        request.prefill, request.held = "ended", held
        tokens = (len(request.tid), request.tokens)
        name = "p-" + request.tid
        self.do_producer(
            self.producer.end(request.tid, tokens, self.now, held=held, request_id=name)
        )
        if not held:
            self.overwrite(request)

    @rule(data=st.data())
    @precondition(lambda self: self.where(started=False, unneeded=False))
    def start(self, data: Any) -> None:
        self.start_now(self.pick(data, self.where(started=False, unneeded=False)))

    def start_now(self, request: Request) -> None:
        request.started, request.link = True, self.link()
        subscription = Subscribe(request.tid, request.tokens, request.target)
        parts = [self.producer._plan.whole(n) for n in range(len(GROUPS))]
        subscriptions = [(request.link, subscription, parts)]
        self.do_consumer(self.consumer.subscribe("d-" + request.tid, subscriptions, self.now))

    # One rule for all that goes wrong, so that things go wrong now and then.
    @rule(data=st.data(), kind=st.sampled_from(MISHAPS))
    @precondition(lambda self: self.links)
    def mishap(self, data: Any, kind: str) -> None:
        running = self.where(prefill="running")
        waiting = self.where(started=False, unneeded=False)
        loading = self.where(started=True, outcomes=[])
        if kind == "abort" and running:
            self.finish_now(self.pick(data, running), held=False)
        elif kind == "unneeded" and waiting:
            request = self.pick(data, waiting)
            request.unneeded = True
            self.link().to_producer.append(Cancel(request.tid))
        elif kind == "cancel" and loading:
            self.do_consumer(self.consumer.cancel(self.pick(data, loading).tid, "cancelled"))
        elif kind == "break" and self.links[-1].consumer_up:
            self.consumer_down(self.links[-1])
        elif kind == "damage":
            self.links[-1].damages = data.draw(st.integers(1, 3))
        elif kind == "wait":
            self.tick(data.draw(st.sampled_from([LEASE_S, RECEIVE_S])))

    # -- the threads of the links

    @rule(data=st.data(), copied=st.booleans(), ahead=st.booleans())
    @precondition(lambda self: self.links)
    def write(self, data: Any, copied: bool, ahead: bool) -> None:
        link = data.draw(st.sampled_from(self.links))
        self.write_next(link, copied or data.draw(st.booleans()), ahead)

    def write_next(self, link: SimLink, copied: bool = True, ahead: bool = False) -> None:
        """Let the writer take its next item or end its oldest copy. `ahead`: it takes the item
        although a copy goes on."""
        if link.copying and not (ahead and link.queue and len(link.copying) < MAX_IN_FLIGHT):
            self.end_copy(link, copied=copied)
        elif link.queue:
            item = link.queue.popleft()
            if isinstance(item, SendChunk):
                if self.producer.begin_copy(item):
                    link.copying.append(item)
                    if ahead:
                        self.do_producer(self.producer.next_chunk(item, self.now))
            else:
                link.to_consumer.append((item, []))

    @rule(data=st.data())
    @precondition(lambda self: self.links)
    def consumer_reads(self, data: Any) -> None:
        self.consumer_read(data.draw(st.sampled_from(self.links)))

    def consumer_read(self, link: SimLink) -> None:
        if not link.consumer_up or not link.to_consumer:
            return
        message, payload = link.to_consumer.popleft()
        if isinstance(message, ChunkReady):
            self.receive(link, message, payload)
        else:
            self.do_consumer(
                self.consumer.on_message(link, message, self.now, "sim", is_pull=self.is_pull)
            )

    def receive(self, link: SimLink, chunk: ChunkReady, payload: list[Content]) -> None:
        place = self.consumer.begin_chunk(link, chunk)
        if place is None:
            return
        assert not self.requests[chunk.transfer_id].outcomes, "written after the end"
        if self.is_pull:
            payload = [self.source.get(block, GARBAGE) for block in chunk.block_ids]
        if link.damages:
            link.damages -= 1
            payload = [DAMAGED] * len(payload)
        self.target.update(zip(place.block_ids, payload, strict=True))
        digests = digests_of(payload)
        self.do_consumer(self.consumer.end_chunk(link, chunk, self.now, 0.1, digests))

    @rule()
    def digest(self) -> None:
        """Let the digester run; a step may preempt the transfer meanwhile."""
        for tid in list(self.requests):
            while (found := self.producer.undigested(tid)) is not None:
                digests = digests_of([self.source.get(b, GARBAGE) for b in found.block_ids])
                self.do_producer(self.producer.digested(found, digests, self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.links)
    def producer_reads(self, data: Any) -> None:
        self.producer_read(data.draw(st.sampled_from(self.links)))

    def producer_read(self, link: SimLink) -> None:
        if not link.producer_up or not link.to_producer:
            return
        message = link.to_producer.popleft()
        chunks = 1 + self.is_wide
        self.do_producer(self.producer.on_message(link, message, self.now, chunks))

    @rule(times=st.integers(1, 6))
    @precondition(lambda self: self.links)
    def go_on(self, times: int) -> None:
        """Let every party act in turn."""
        for link in self.links * times:
            self.digest()
            self.producer_read(link)
            self.write_next(link)
            self.consumer_read(link)

    @rule(data=st.data())
    @precondition(lambda self: self.half_broken())
    def notice(self, data: Any) -> None:
        """Report a broken link to the other end."""
        link = data.draw(st.sampled_from(self.half_broken()))
        if link.consumer_up:
            self.consumer_down(link)
        else:
            self.producer_down(link)

    def half_broken(self) -> list[SimLink]:
        return [link for link in self.links if link.producer_up != link.consumer_up]

    @rule(seconds=st.floats(0.0, 1.0))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do_producer(self.producer.tick(self.now))
        self.do_consumer(self.consumer.tick(self.now))

    # -- what holds

    @invariant()
    def held_blocks_are_accounted_for(self) -> None:
        """Assert that the machine knows all held blocks: the ledger cannot leak."""
        waiting = sum(1 for r in self.requests.values() if r.held and not r.released)
        assert waiting <= len(self.producer)
        pending = sum(1 for r in self.requests.values() if r.started and not r.outcomes)
        assert pending == len(self.consumer)

    def teardown(self) -> None:
        """Assert that everything ends and nothing is held if no fault happens."""
        for request in self.where(prefill="running"):
            self.finish_now(request, held=True)
        for link in self.links:
            if link.producer_up:
                self.producer_down(link)
            while link.copying:
                self.end_copy(link, copied=False)
            if link.consumer_up:
                self.consumer_down(link)
        self.tick(LEASE_S)
        assert len(self.producer) == 0
        assert len(self.consumer) == 0
        for request in self.requests.values():
            assert len(request.outcomes) == request.started
            assert request.released == request.held


TestMachines = World.TestCase


def test_without_mishaps_a_transfer_is_received() -> None:
    """Transfers of the world above can succeed, so its checks are not vacuous."""
    world = World()
    world.arrive(tokens=18, cached=1, start=True)
    world.producer.expect("t", "p-t", 0.0)
    world.requests["t"].prefill = "running"
    world.finish_now(world.requests["t"], held=True)
    world.go_on(times=16)
    assert [type(x) for x in world.requests["t"].outcomes] == [Received]
    assert world.requests["t"].released == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_several_chunks_of_digests_are_one_that_is_sent(is_early: bool) -> None:
    producer = Producer[str](
        plan=CopyPlan((Shard(1, 16, KvGroup(0, BLOCK), (1,)),)),
        chunk_blocks={0: 2},
        hold_s=30.0,
        heartbeat_s=5.0,
    )
    wanted = Subscribe("t", 7 * BLOCK, [GroupBlocks(0, 0, list(range(7)), [0, 1, 0], [0, 1, 0])])
    if not is_early:
        producer.expect("t", "p-t", 0.0)
    producer.on_message("link", wanted, 0.0, 3)
    if is_early:
        producer.expect("t", "p-t", 0.0)
    [chunk, _] = producer.progress("t", [list(range(7))], 7 * BLOCK, 0.0)
    assert isinstance(chunk, SendChunk)
    assert chunk.block_ids == [0, 1, 2, 3, 4, 5]
    undigested = producer.undigested("t")
    assert undigested is not None
    assert undigested.block_ids == [0, 1]


def test_a_stage_with_only_windows_may_have_no_block_to_send() -> None:
    """The first token after a chunk of local attention needs none of it. The stage's tokens and its
    release are still due, and a subscription without blocks that are needed is refused."""
    chunk = KvGroup(0, BLOCK, GroupKind.CHUNK, 2 * BLOCK)
    producer: Producer[str] = Producer(
        plan=CopyPlan((Shard(1, 16, chunk, (1,)),)),
        chunk_blocks={0: 1},
        hold_s=30.0,
        heartbeat_s=5.0,
    )
    consumer: Consumer[str] = Consumer(30.0)
    for name, tokens in (("t", 16), ("u", 18)):
        wanted = Subscribe(
            name, tokens, [GroupBlocks(0, -(-tokens // 4), [], [0, 1, 0], [0, 1, 0])]
        )
        producer.expect(name, f"p-{name}", 0.0)
        [subscribe] = consumer.subscribe(f"d-{name}", [("link", wanted, ())], 0.0)
        actions = producer.on_message("link", subscribe.message, 0.0)
        actions += producer.progress(name, [list(range(5))], tokens, 0.0)
        actions += producer.end(name, (7,), 0.0, held=True, request_id=f"p-{name}")
        for sent in [action for action in actions if isinstance(action, Send)]:
            for answer in consumer.on_message("link", sent.message, 0.0, "tcp", is_pull=False):
                actions += producer.on_message("link", answer.message, 0.0)
        assert Release(f"p-{name}") in actions
    received, failed = consumer.take_outcomes()
    assert isinstance(received, Received)
    assert received.token_ids == (7,)
    assert isinstance(failed, ReceiveFailed)
