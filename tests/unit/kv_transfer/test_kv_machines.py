"""The two state machines against each other, over a simulated link that keeps order and may break.

The world below plays both engines, both workers' threads and the memory, token by token: the two
engines' blocks may differ in size. Every step is one thing that one thread could do next;
hypothesis chooses the order.
"""

from __future__ import annotations

import zlib
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kv_transfer import source_actions as src
from kv_transfer import target as tgt
from kv_transfer.messages import (
    Ack,
    Again,
    Alive,
    Cancel,
    Chunk,
    Done,
    Fail,
    Grant,
    Message,
)
from kv_transfer.protocol.plan import Shard
from kv_transfer.source import SourceTable
from tests.unit.kv_transfer.simulation import Content, Engine, Job, Request, SimLink

BLOCK = 4
SHARD = Shard(1, 16 * BLOCK, BLOCK)
LEASE_S = 30.0
RECEIVE_S = 60.0
CANCEL_S = 5.0
MISHAPS = ("abort", "unneeded", "cancel", "break", "wait", "damage")
GARBAGE = ("garbage", -1)
DAMAGED = ("damaged", -1)
Cell = tuple[int, int]  # block, token of it


def cells(blocks: list[int], size: int) -> list[Cell]:
    """The places of the blocks' tokens, in order."""
    return [(block, token) for block in blocks for token in range(size)]


def digest_of(contents: list[Content]) -> int:
    """Another one for other contents; never 0."""
    return zlib.crc32(repr(contents).encode()) or 1


class World(RuleBasedStateMachine):
    """See the top of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sources: SourceTable[SimLink] = SourceTable(
            shard=SHARD,
            chunk_blocks=1,
            lease_s=LEASE_S,
            grant_wait_s=20.0,
            alive_s=5.0,
            by_token=True,
        )
        self.size = BLOCK
        self.targets: tgt.TargetTable[SimLink] = tgt.TargetTable(RECEIVE_S, CANCEL_S)
        self.links: list[SimLink] = []
        self.requests: dict[str, Request] = {}
        self.source_memory: dict[Cell, Content] = {}
        self.target_memory: dict[Cell, Content] = {}
        self.next_block = 0

    @initialize(size=st.sampled_from([BLOCK, BLOCK, 2, 6, 8]))
    def begin(self, size: int) -> None:
        """The target's blocks have so many tokens."""
        self.size = size

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
        """The one that a target uses now; a new one when the last broke."""
        if not self.links or not self.links[-1].target_up:
            self.links.append(SimLink())
        return self.links[-1]

    def do_source(self, actions: list[src.SourceAction[SimLink]]) -> None:
        for action in actions:
            match action:
                case src.PushChunk() | src.SendDone():
                    action.link.jobs.append(action)
                case src.SendFail(link, tid, reason):
                    link.urgent.append(Fail(tid, reason))
                case src.SendAlive(link, tid):
                    link.urgent.append(Alive([tid]))
                case src.Release(request_id):
                    self.release(self.requests[request_id.removeprefix("p-")])

    def release(self, request: Request) -> None:
        assert request.held, "a release of blocks that nobody held"
        request.released += 1
        assert request.released == 1, "released twice"
        busy = [link.busy for link in self.links if link.busy is not None]
        assert all(b.transfer_id != request.tid for b in busy), "released under a copy"
        self.overwrite(request)

    def overwrite(self, request: Request) -> None:
        """The engine gives the blocks to others."""
        for cell in cells(request.source_blocks, BLOCK):
            self.source_memory[cell] = GARBAGE

    def do_target(self, actions: list[tgt.TargetAction[SimLink]]) -> None:
        for action in actions:
            match action:
                case tgt.SendGrant(link, grant):
                    link.to_source.append(grant)
                case tgt.SendAgain(link, tid, first):
                    link.to_source.append(Again(tid, first))
                case tgt.SendCancel(link, tid):
                    link.to_source.append(Cancel(tid))
                case tgt.SendAck(link, tid):
                    link.to_source.append(Ack(tid))
                case tgt.DropLink(link):
                    self.target_down(link)
        self.report()

    def report(self) -> None:
        for outcome in self.targets.take_outcomes():
            request = self.requests[outcome.request_id.removeprefix("d-")]
            request.outcomes.append(outcome)
            assert request.started
            assert len(request.outcomes) == 1, "two outcomes"
            if isinstance(outcome, tgt.Received):
                assert outcome.token_ids == (len(request.tid), request.tokens)
                assert outcome.report.blocks == len(request.target_blocks)
                tokens = range(request.first_block * self.size, request.tokens)
                for token, cell in zip(tokens, cells(request.target_blocks, self.size)):  # noqa: B905
                    assert self.target_memory.get(cell) == (request.tid, token)

    def target_down(self, link: SimLink) -> None:
        link.target_up = False
        self.targets.link_down(link, "down")

    def source_down(self, link: SimLink) -> None:
        link.source_up = False
        link.jobs.clear()
        link.urgent.clear()
        self.do_source(self.sources.link_down(link))

    def end_copy(self, link: SimLink, *, copied: bool) -> None:
        chunk = link.busy
        assert chunk is not None
        link.busy = None
        request = self.requests[chunk.transfer_id]
        if copied:
            count = len(chunk.target_ids)
            assert count > 0
            assert bool(chunk.tokens) == (self.size != BLOCK)
            tokens = chunk.tokens or count * BLOCK
            assert (count - 1) * self.size < tokens <= count * self.size
            if chunk is not request.outdated:
                assert chunk.first == request.copied, "not in order, or twice"
                request.copied += count
            granted = request.target_blocks[chunk.first : chunk.first + count]
            assert chunk.target_ids == granted
            come_from = cells(chunk.source_ids, BLOCK)[chunk.skip :][:tokens]
            contents = [self.source_memory.get(cell, GARBAGE) for cell in come_from]
            damaged = link.damages > 0
            link.damages -= damaged
            for content, t in zip(
                contents, cells(chunk.target_ids, self.size)[:tokens], strict=True
            ):
                assert not request.outcomes, "written after the target took its blocks back"
                self.target_memory[t] = DAMAGED if damaged else content
            if link.source_up:
                link.to_target.append(
                    Chunk(
                        chunk.transfer_id,
                        chunk.first,
                        count,
                        tokens,
                        digest_of(contents),
                        chunk.tokens,
                    )
                )
        self.do_source(self.sources.end_copy(chunk, self.now, 0.1, copied=copied))
        if not copied and link.source_up:
            self.source_down(link)

    # -- the engines

    @rule(tokens=st.integers(1, 13), cached=st.integers(0, 2), start=st.booleans())
    @precondition(lambda self: len(self.requests) < 4)
    def arrive(self, tokens: int, cached: int, start: bool) -> None:
        tid = "t" * (len(self.requests) + 1)
        source, target = -(-tokens // BLOCK), -(-tokens // self.size)
        first = min(cached, (tokens - 1) // self.size)
        self.requests[tid] = Request(
            tid, tokens, first, self.blocks(source), self.blocks(target - first), self.size
        )
        if start:
            self.start_now(self.requests[tid])

    @rule(data=st.data())
    @precondition(lambda self: self.where(prefill=Engine.NEW))
    def expect(self, data: Any) -> None:
        request = self.pick(data, self.where(prefill=Engine.NEW))
        request.prefill = Engine.RUNNING
        self.do_source(self.sources.expect(request.tid, "p-" + request.tid, self.now))

    @rule(data=st.data(), step=st.integers(1, 5))
    @precondition(lambda self: self.where(prefill=Engine.RUNNING))
    def compute(self, data: Any, step: int) -> None:
        request = self.pick(data, self.where(prefill=Engine.RUNNING))
        request.ready = min(request.tokens, request.ready + step)
        self.progress(request)

    @rule(data=st.data())
    @precondition(lambda self: self.where(prefill=Engine.RUNNING))
    def preempt(self, data: Any) -> None:
        request = self.pick(data, self.where(prefill=Engine.RUNNING))
        self.sources.preempt(request.tid)
        for link in self.sources.copying_over(request.tid):  # the step waits for them
            self.end_copy(link, copied=True)
        assert not self.sources.copying_over(request.tid)
        self.overwrite(request)
        request.source_blocks = self.blocks(len(request.source_blocks))
        request.ready = 0

    @rule(data=st.data())
    @precondition(lambda self: self.where(prefill=Engine.RUNNING))
    def finish_prefill(self, data: Any) -> None:
        request = self.pick(data, self.where(prefill=Engine.RUNNING))
        self.compute_all(request)
        self.end(request, held=True)

    def compute_all(self, request: Request) -> None:
        request.ready = request.tokens
        self.progress(request)

    def progress(self, request: Request) -> None:
        """The step has run: the memory holds its tokens, and the table may know."""
        for token, cell in zip(range(request.ready), cells(request.source_blocks, BLOCK)):  # noqa: B905
            self.source_memory[cell] = (request.tid, token)
        blocks = request.source_blocks[: -(-request.ready // BLOCK)]
        self.do_source(self.sources.progress(request.tid, blocks, request.ready, self.now))

    def end(self, request: Request, *, held: bool) -> None:
        request.prefill, request.held = Engine.ENDED, held
        tokens = (len(request.tid), request.tokens)
        self.do_source(
            self.sources.end(
                request.tid, tokens, self.now, held=held, request_id="p-" + request.tid
            )
        )
        if not held:
            self.overwrite(request)

    @rule(data=st.data())
    @precondition(lambda self: self.where(started=False, unneeded=False))
    def start(self, data: Any) -> None:
        self.start_now(self.pick(data, self.where(started=False, unneeded=False)))

    def start_now(self, request: Request) -> None:
        request.started, request.link = True, self.link()
        self.do_target(
            self.targets.start("d-" + request.tid, [(request.link, request.grant, None)], self.now)
        )

    # One rule for all that goes wrong, so that things go wrong now and then, not most of the time.
    @rule(data=st.data(), kind=st.sampled_from(MISHAPS))
    @precondition(lambda self: self.links)
    def mishap(self, data: Any, kind: str) -> None:
        running = self.where(prefill=Engine.RUNNING)
        waiting = self.where(started=False, unneeded=False)
        loading = self.where(started=True, outcomes=[])
        if kind == "abort" and running:
            self.end(self.pick(data, running), held=False)
        elif kind == "unneeded" and waiting:
            request = self.pick(data, waiting)
            request.unneeded = True
            self.link().to_source.append(Cancel(request.tid))
        elif kind == "cancel" and loading:
            request = self.pick(data, loading)
            self.do_target(self.targets.cancel(request.tid, "cancelled", self.now))
        elif kind == "break" and self.links[-1].target_up:
            self.target_down(self.links[-1])
        elif kind == "damage":
            self.links[-1].damages = data.draw(st.integers(1, 3))
        elif kind == "wait":
            self.tick(data.draw(st.sampled_from([CANCEL_S, LEASE_S, RECEIVE_S])))

    # -- the threads of the links

    @rule(data=st.data(), whole=st.booleans())
    @precondition(lambda self: self.links)
    def write(self, data: Any, whole: bool) -> None:
        self.write_next(self.links[data.draw(st.integers(0, len(self.links) - 1))], whole)

    def write_next(self, link: SimLink, whole: bool) -> None:
        """The writer takes its next thing up, or ends the copy that it is in."""
        if link.busy is not None:
            self.end_copy(link, copied=link.source_up or whole)
        elif link.urgent:
            link.to_target.append(link.urgent.popleft())
        elif link.jobs:
            self.work(link, link.jobs.popleft())

    def work(self, link: SimLink, job: Job) -> None:
        if isinstance(job, src.SendDone):
            figures = self.sources.done_figures(job, self.now)
            if figures is not None:
                link.to_target.append(Done(job.transfer_id, *figures))
        elif self.sources.begin_copy(job):
            link.busy = job
            if link.sealed:
                self.end_copy(link, copied=False)

    @rule(data=st.data())
    @precondition(lambda self: self.links)
    def target_reads(self, data: Any) -> None:
        self.target_read(self.links[data.draw(st.integers(0, len(self.links) - 1))])

    def target_read(self, link: SimLink) -> None:
        if link.target_up and link.to_target:
            self.receive(link, link.to_target.popleft())

    def receive(self, link: SimLink, message: Message) -> None:
        match message:
            case Chunk():
                place = self.targets.begin_chunk(link, message)
                if place is not None:
                    places = cells(place.block_ids, self.size)[: message.bytes]
                    found = digest_of([self.target_memory.get(c, GARBAGE) for c in places])
                    intact = found == message.digest
                    self.do_target(self.targets.end_chunk(link, message, self.now, intact=intact))
            case Done():
                self.do_target(self.targets.done(link, message, "sim"))
            case Fail(tid, reason):
                self.targets.fail(link, tid, reason)
            case Alive(tids):
                self.targets.alive(link, tids, self.now)
        self.report()

    @rule(data=st.data())
    @precondition(lambda self: self.links)
    def source_reads(self, data: Any) -> None:
        self.source_read(self.links[data.draw(st.integers(0, len(self.links) - 1))])

    def source_read(self, link: SimLink) -> None:
        if not link.source_up or not link.to_source:
            return
        message = link.to_source.popleft()
        match message:
            case Grant():
                self.do_source(self.sources.grant(link, message, self.now))
            case Again(tid, first):
                self.again(link, tid, first)
            case Cancel(tid):
                self.do_source(self.sources.cancel(link, tid))
            case Ack(tid):
                self.do_source(self.sources.ack(link, tid))

    def again(self, link: SimLink, tid: str, first: int) -> None:
        actions = self.sources.again(link, tid, first, self.now)
        if not any(isinstance(action, src.SendFail) for action in actions):
            request = self.requests[tid]
            request.copied = first
            if link.busy is not None and link.busy.transfer_id == tid:
                request.outdated = link.busy
        self.do_source(actions)

    @rule(times=st.integers(1, 6))
    @precondition(lambda self: self.links)
    def go_on(self, times: int) -> None:
        """Everybody does what there is to do, in turn."""
        for link in self.links * times:
            self.source_read(link)
            self.write_next(link, True)
            self.target_read(link)

    @rule(data=st.data())
    @precondition(lambda self: self.broken())
    def notice(self, data: Any) -> None:
        """The other end hears of it."""
        link = data.draw(st.sampled_from(self.broken()))
        if link.target_up:
            self.target_down(link)
        else:
            self.source_down(link)

    def broken(self) -> list[SimLink]:
        return [link for link in self.links if link.source_up != link.target_up]

    @rule()
    @precondition(lambda self: self.targets.fencing())
    def fence(self) -> None:
        for link in self.targets.fencing():
            if link.busy is None:
                link.sealed = True
                self.targets.fenced(link)
        self.report()

    @rule(seconds=st.floats(0.0, 1.0))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do_source(self.sources.tick(self.now))
        self.do_target(self.targets.tick(self.now))

    # -- what holds

    @invariant()
    def held_blocks_are_accounted_for(self) -> None:
        """What is held and not released is known to the table: the ledger cannot leak."""
        waiting = sum(1 for r in self.requests.values() if r.held and not r.released)
        assert waiting <= len(self.sources)
        pending = sum(1 for r in self.requests.values() if r.started and not r.outcomes)
        assert pending == len(self.targets)

    def teardown(self) -> None:
        for request in self.where(prefill=Engine.RUNNING):
            self.compute_all(request)
            self.end(request, held=True)
        for link in self.links:
            if link.source_up:
                self.source_down(link)
            if link.busy is not None:
                self.end_copy(link, copied=False)
            if link.target_up:
                self.target_down(link)
        self.fence()
        self.tick(LEASE_S)
        assert len(self.sources) == 0, repr(self.sources)
        assert len(self.targets) == 0, repr(self.targets)
        for request in self.requests.values():
            assert len(request.outcomes) == request.started
            assert request.released == request.held


World.TestCase.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
TestMachines = World.TestCase
