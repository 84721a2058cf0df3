"""Several ranks on both sides: their state machines against each other, one link a pair of ranks.

The world plays the two engines, which tell all of their ranks the same, the threads of the links,
and the memory head by head. Hypothesis chooses the pools, the order, and what goes wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from kv_transfer.messages import Ack, Alive, Cancel, Chunk, Done, Fail, Grant
from kv_transfer.protocol.plan import Shard
from kv_transfer.source import SourceTable
from tests.unit.kv_transfer.simulation import SimLink

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart

BLOCK, HEADS = 4, 4
BLOCKS = 3
TOKENS = BLOCKS * BLOCK - 1
LEASE_S, RECEIVE_S, CANCEL_S = 30.0, 60.0, 5.0
HEAD_PAGE = BLOCK  # bytes are counted in tokens of one head
OURS, FREED = "ours", "freed"

Cell = tuple[int, int]  # block, place in the page
Key = tuple[int, int]  # source rank, target rank


class Ranks(RuleBasedStateMachine):
    """One transfer, "t", of request "p" to request "d"."""

    @initialize(
        sizes=st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)]),
        is_calm=st.booleans(),
    )
    def begin(self, sizes: tuple[int, int], is_calm: bool) -> None:
        self.is_calm = is_calm  # nothing goes wrong, so every rank must get everything
        self.now, self.ready = 0.0, 0
        self.expected = self.started = self.ended = False
        self.held = False
        self.source_shards, self.target_shards = (
            [Shard(HEADS, HEAD_PAGE, BLOCK, tp, rank) for rank in range(tp)] for tp in sizes
        )
        self.sources: list[SourceTable[SimLink]] = [
            SourceTable(shard=s, chunk_blocks=1, lease_s=LEASE_S, grant_wait_s=20.0, alive_s=5.0)
            for s in self.source_shards
        ]
        self.targets: list[tgt.TargetTable[SimLink]] = [
            tgt.TargetTable(RECEIVE_S, CANCEL_S) for _ in self.target_shards
        ]
        self.links: dict[Key, SimLink] = {}
        self.released = [0] * sizes[0]
        self.outcomes: list[list[tgt.TargetOutcome]] = [[] for _ in range(sizes[1])]
        # What lies in each head's place of each block; a source's until its blocks are freed.
        self.memory: list[dict[Cell, int]] = [{} for _ in range(sizes[1])]
        self.source_memory = [OURS] * sizes[0]

    # -- what the tables ask for

    def link(self, source: int, target: int) -> SimLink:
        found = self.links.get((source, target))
        if found is None or not found.target_up:
            found = self.links[source, target] = SimLink()
        return found

    def do_source(self, rank: int, actions: list[src.SourceAction[SimLink]]) -> None:
        for action in actions:
            match action:
                case src.PushChunk() | src.SendDone():
                    action.link.jobs.append(action)
                case src.SendFail(link, tid, reason):
                    link.urgent.append(Fail(tid, reason))
                case src.SendAlive(link, tid):
                    link.urgent.append(Alive([tid]))
                case src.Release():
                    self.released[rank] += 1
                    assert self.held, "a release of blocks that nobody held"
                    busy = [k for k, link in self.links.items() if link.busy and k[0] == rank]
                    assert not busy, "released under a copy"
                    self.source_memory[rank] = FREED

    def do_target(self, rank: int, actions: list[tgt.TargetAction[SimLink]]) -> None:
        for action in actions:
            match action:
                case tgt.SendGrant(link, grant):
                    link.to_source.append(grant)
                case tgt.SendCancel(link, tid):
                    link.to_source.append(Cancel(tid))
                case tgt.SendAck(link, tid):
                    link.to_source.append(Ack(tid))
                case tgt.DropLink(link):
                    self.target_down(rank, link)
        self.outcomes[rank] += self.targets[rank].take_outcomes()
        assert len(self.outcomes[rank]) <= 1, "two outcomes"
        if self.outcomes[rank] and isinstance(self.outcomes[rank][0], tgt.Received):
            heads = self.target_shards[rank].heads
            want = {
                (block, i): head
                for block in range(BLOCKS)
                for i, head in enumerate(range(heads.start, heads.stop))
            }
            assert self.memory[rank] == want

    def target_down(self, rank: int, link: SimLink) -> None:
        link.target_up = False
        self.targets[rank].link_down(link, "down")

    def source_down(self, rank: int, link: SimLink) -> None:
        link.source_up = False
        link.jobs.clear()
        link.urgent.clear()
        self.do_source(rank, self.sources[rank].link_down(link))

    # -- the engines

    @rule()
    @precondition(lambda self: not self.expected)
    def expect(self) -> None:
        self.expected = True
        for rank, table in enumerate(self.sources):
            self.do_source(rank, table.expect("t", "p", self.now))

    @rule(tokens=st.integers(1, TOKENS))
    @precondition(lambda self: self.expected and not self.ended)
    def compute(self, tokens: int) -> None:
        self.ready = min(TOKENS, self.ready + tokens)
        for rank, table in enumerate(self.sources):
            self.do_source(rank, table.progress("t", list(range(BLOCKS)), self.ready, self.now))

    @rule(aborted=st.sampled_from([False] * 5 + [True]))
    @precondition(lambda self: self.expected and not self.ended)
    def end(self, aborted: bool) -> None:
        self.compute(TOKENS)
        self.ended, self.held = True, self.is_calm or not aborted
        for rank, table in enumerate(self.sources):
            self.do_source(rank, table.end("t", (7,), self.now, held=self.held, request_id="p"))

    @rule()
    @precondition(lambda self: not self.started)
    def start(self) -> None:
        self.started = True
        for rank, shard in enumerate(self.target_shards):
            reads = shard.reads(len(self.sources), "t")
            grants: list[tuple[SimLink, Grant, PagePart | None]] = []
            for read in reads:
                link = self.link(read.producer_rank, rank)
                ids = list(range(BLOCKS))
                grant = Grant("t", 0, TOKENS, ids, "", list(read.heads), read.readers)
                grants.append((link, grant, read.part))
            self.do_target(rank, self.targets[rank].start("d", grants, self.now))
            for source in shard.declines(len(self.sources), "t"):
                self.link(source, rank).to_source.append(Cancel("t"))

    @rule()
    @precondition(lambda self: self.started and not self.is_calm)
    def cancel(self) -> None:
        for rank, table in enumerate(self.targets):
            self.do_target(rank, table.cancel("t", "cancelled", self.now))

    # -- the threads of the links

    @rule(data=st.data(), times=st.integers(1, 12))
    @precondition(lambda self: self.links)
    def run_links(self, data: Any, times: int) -> None:
        """Some of them go on for a while, the others stand still."""
        keys = data.draw(st.sets(st.sampled_from(sorted(self.links)), min_size=1))
        for key in sorted(keys) * times:
            self.source_reads(key)
            self.writes(key)
            self.target_reads(key)

    def source_reads(self, key: Key) -> None:
        link, (rank, _) = self.links[key], key
        if not link.source_up or not link.to_source:
            return
        table = self.sources[rank]
        match link.to_source.popleft():
            case Grant() as grant:
                self.do_source(rank, table.grant(link, grant, self.now))
            case Cancel(tid):
                self.do_source(rank, table.cancel(link, tid))
            case Ack(tid):
                self.do_source(rank, table.ack(link, tid))

    def writes(self, key: Key) -> None:
        link, (rank, _) = self.links[key], key
        if link.busy is not None:
            self.end_copy(key, copied=True)
        elif link.urgent:
            link.to_target.append(link.urgent.popleft())
        elif link.jobs:
            job = link.jobs.popleft()
            if isinstance(job, src.SendDone):
                figures = self.sources[rank].done_figures(job, self.now)
                if figures is not None:
                    link.to_target.append(Done("t", *figures))
            elif self.sources[rank].begin_copy(job):
                link.busy = job
                if link.sealed:
                    self.end_copy(key, copied=False)

    def end_copy(self, key: Key, *, copied: bool) -> None:
        link, (rank, target) = self.links[key], key
        chunk = link.busy
        assert chunk is not None
        link.busy = None
        if copied:
            assert not self.outcomes[target], "written after the target took its blocks back"
            assert self.source_memory[rank] == OURS, "read after the release"
            assert chunk.part is not None
            first = chunk.part.source_start // HEAD_PAGE
            into = chunk.part.target_start // HEAD_PAGE
            for i in range(chunk.part.size // HEAD_PAGE):
                head = self.source_shards[rank].heads.start + first + i
                for block in chunk.target_ids:
                    assert (block, into + i) not in self.memory[target], "sent twice"
                    self.memory[target][block, into + i] = head
            if link.source_up:
                link.to_target.append(Chunk("t", chunk.first, len(chunk.source_ids), 1))
        self.do_source(rank, self.sources[rank].end_copy(chunk, self.now, 0.1, copied=copied))

    def target_reads(self, key: Key) -> None:
        link, (_, rank) = self.links[key], key
        if not link.target_up or not link.to_target:
            return
        table = self.targets[rank]
        match link.to_target.popleft():
            case Chunk() as chunk:
                if table.begin_chunk(link, chunk) is not None:
                    self.do_target(rank, table.end_chunk(link, chunk, self.now, intact=True))
            case Done() as done:
                self.do_target(rank, table.done(link, done, "sim"))
            case Fail(tid, reason):
                table.fail(link, tid, reason)
                self.do_target(rank, [])
            case Alive(tids):
                table.alive(link, tids, self.now)

    # -- what goes wrong, and time

    @rule(data=st.data())
    @precondition(lambda self: self.links and not self.is_calm)
    def break_one(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.links)))
        if self.links[key].target_up:
            self.target_down(key[1], self.links[key])

    @rule()
    def notice(self) -> None:
        """The other ends hear of broken links, and what is idle is fenced."""
        for (source, _), link in self.links.items():
            if link.source_up and not link.target_up:
                self.source_down(source, link)
        self.fence()

    def fence(self) -> None:
        for rank, table in enumerate(self.targets):
            for link in table.fencing():
                if link.busy is None:
                    link.sealed = True
                    table.fenced(link)
            self.do_target(rank, [])

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, CANCEL_S, LEASE_S]))
    def tick(self, seconds: float) -> None:
        self.now += 0.1 if self.is_calm else seconds
        for rank, source in enumerate(self.sources):
            self.do_source(rank, source.tick(self.now))
        for rank, target in enumerate(self.targets):
            self.do_target(rank, target.tick(self.now))

    # -- what holds

    @invariant()
    def nothing_is_reported_or_released_twice(self) -> None:
        assert all(count <= 1 for count in self.released)
        for rank, table in enumerate(self.targets):
            assert len(table) == (self.started and not self.outcomes[rank])

    def teardown(self) -> None:
        if not self.expected:
            self.expect()
        if not self.ended:
            self.end(aborted=False)
        if not self.started:
            self.start()
        for _ in range(6 * BLOCKS + 20):  # left to itself it comes to its end
            self.tick(0.1)
            self.notice()
            for key in sorted(self.links):
                self.source_reads(key)
                self.writes(key)
                self.target_reads(key)
        if self.is_calm:
            assert all(isinstance(x, tgt.Received) for each in self.outcomes for x in each)
            assert all(len(each) == 1 for each in self.outcomes)
            assert self.released == [1] * len(self.sources)
        self.is_calm = False
        self.tick(LEASE_S)  # for readers that never came
        for key in sorted(self.links) * 4:
            self.writes(key)
            self.target_reads(key)
        self.notice()
        assert [len(table) for table in self.targets] == [0] * len(self.targets)
        assert [len(table) for table in self.sources] == [0] * len(self.sources)
        assert all(len(outcomes) == 1 for outcomes in self.outcomes)
        assert self.released == [int(self.held)] * len(self.sources)


Ranks.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRanks = Ranks.TestCase
