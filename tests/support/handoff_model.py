"""A model of one request, its routers, a prefill and a decode worker, with the real state machines
of the hand-off (Handoff, Recovery, Producer, Consumer), for the explorer.

The world simulates the engines, the connections and the threads of the KV link. An action is one
possible next step of one party. A fault is also an action; each world has a budget of faults.
Messages of one connection keep their order; nothing else is ordered. Time stands still, except
during the fault `pause`, and at the end, when all timeouts and holds expire.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from kv_transfer.cache.geometry import KvGroup
from kv_transfer.errors import ProtocolError
from kv_transfer.protocol.consumer import Consumer, Received
from kv_transfer.protocol.messages import (
    ChunkReady,
    Fail,
    GroupBlocks,
    Send,
    Subscribe,
)
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.producer import DigestBlocks, Producer, Release, SendChunk
from pdserve.config import QueueConfig, RetryConfig
from pdserve.errors import Unavailable, WorkerFailed
from pdserve.types import ErrorInfo, FinishReason, StreamDelta
from router.attempt.handoff import (
    Exported,
    Failed,
    Finished,
    Handoff,
    Side,
)
from router.attempt.recovery import (
    Confirm,
    Facts,
    GiveUp,
    Ping,
    Recovery,
    RecoveryLimits,
    ReserveWorkers,
    RetryStep,
    RunAttempt,
    Wait,
)
from router.attempt.suspects import Death, Suspicion

if TYPE_CHECKING:
    from tests.support.explorer import Action

BLOCK, MAX_TOKENS = 4, 3
SIDES = {"p": Side.PREFILL, "d": Side.DECODE}
LEASE_S, RECEIVE_S = 30.0, 60.0
FIRST_TOKEN = 100
SHARD = Shard(1, 16, KvGroup(0, BLOCK), (1,))
FAULTS = (
    *("kill_p", "kill_d", "kill_router", "break_p", "break_d", "break_link"),
    *("lose", "double", "damage", "pause", "leave", "stale_id", "silent"),
)


class Wire(Enum):
    """Names of KV links. The machines compare links by identity. An enum keeps its identity in
    copies of the world."""

    L0, L1, L2, L3, L4, L5 = range(6)


class OnePlan(CopyPlan):
    """A plan that copies of the world share."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _plan, ()


PLAN = OnePlan((SHARD,))


def _plan() -> OnePlan:
    return PLAN


class OneLimits(RecoveryLimits):
    """The limits of recovery, which copies of the world share."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _limits, ()


LIMITS = OneLimits(QueueConfig(), RetryConfig())
CAUSE, REASON = Unavailable(""), "failed"  # of all failures, so that more states are equal


def _limits() -> OneLimits:
    return LIMITS


@dataclass(frozen=True, slots=True)
class ModelMember:
    """What recovery reads of a member. `lost`: its process has died. Otherwise only a connection to
    it broke, and it is attached again."""

    worker_id: str
    incarnation: int
    lost: bool
    has_left: bool = False

    @property
    def attached(self) -> bool:
        return not self.lost


def crc(contents: list[Any]) -> bytes:
    return b"".join(zlib.crc32(repr(x).encode()).to_bytes(8, "little") for x in contents)


@dataclass(slots=True)
class ModelLink:
    """The state of a KV link and its two ends. `writing` is the chunk that the consumer is
    writing."""

    to_p: list[Any] = field(default_factory=list)
    to_d: list[Any] = field(default_factory=list)
    queue: list[Any] = field(default_factory=list)
    copying: Any = None
    writing: Any = None
    p_up: bool = True
    d_up: bool = True


@dataclass(slots=True)
class EngineRequest:
    """A request in an engine. State `running`: a prefill computes, a decode waits for its KV, or a
    request generates. State `held`: its blocks wait for their release."""

    router: int
    tid: str
    first: int
    state: str = "running"
    has_kv: bool = False
    blocks: list[int] = field(default_factory=list)
    made: int = 0

    @property
    def name(self) -> str:
        return f"{self.router}:{self.tid}"


@dataclass(slots=True)
class ModelWorker:
    """A worker: its requests by name, and the owner of each block. Free blocks are reused at
    once."""

    incarnation: int = 0
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)
    commands: list[Any] = field(default_factory=list)

    def take(self, request: EngineRequest) -> int:
        block = next(n for n in range(99) if n not in self.owner)
        self.owner[block] = request.name
        request.blocks.append(block)
        return block

    @property
    def in_use(self) -> dict[int, str]:
        """The blocks that are not free."""
        return self.owner

    def free(self, request: EngineRequest) -> None:
        for block in request.blocks:
            assert self.owner.pop(block) == request.name, "a block was released by another"
            self.memory.pop(block, None)
        request.blocks = []
        del self.requests[request.name]


@dataclass(slots=True)
class ModelRouter:
    """One router. `seen` has the number of its connection to each worker, as last known to it.
    `recovery` and `suspicion` are of the request. `reserved`: the step whose workers are pinged.
    `waits_until`: the limit of its wait for capacity."""

    number: int
    alive: bool = True
    suspicion: Suspicion = field(default_factory=Suspicion)
    recovery: Recovery | None = None
    reserved: RetryStep | None = None
    waits_until: float | None = None
    handoff: Handoff | None = None
    tid: str = ""
    is_pair: bool = False
    attempts: int = 0
    seen: dict[str, int] = field(default_factory=lambda: {"p": 0, "d": 0})


class HandoffWorld:
    """The whole state. The first of the two routers has the request at the beginning."""

    def __init__(self, faults: int, kinds: tuple[str, ...], *, chunks: int, is_pull: bool) -> None:
        self.faults, self.kinds, self.chunks, self.is_pull = faults, kinds, chunks, is_pull
        self.now = 0.0
        self.client: list[int] = []
        self.ending = ""
        self.routers = [ModelRouter(0), ModelRouter(1)]
        self.active = 0
        self.workers = {"p": ModelWorker(), "d": ModelWorker()}
        self.producer, self.consumer = self.new_producer(), Consumer[Wire](RECEIVE_S)
        self.links: dict[Wire, ModelLink] = {}
        self.damages = 0
        self.has_stale_id = False
        self.losses = 0  # of workers
        self.is_late = False
        # Connections between routers and workers: their numbers, and the messages in flight.
        self.conns = {(w, r): 0 for w in "pd" for r in (0, 1)}
        self.deltas: dict[tuple[str, int], list[Any]] = {key: [] for key in self.conns}
        self.begin(self.routers[0])

    def new_producer(self) -> Producer[Wire]:
        return Producer(plan=PLAN, chunk_blocks={0: 1}, hold_s=LEASE_S, heartbeat_s=5.0)

    # -- routers

    def begin(self, router: ModelRouter) -> None:
        """Start the request at a router, after the client's tokens."""
        resume, router.suspicion = len(self.client), Suspicion()
        router.recovery = Recovery(LIMITS, router.suspicion, max_tokens=MAX_TOKENS, resumed=resume)
        pair_helps = resume + 1 < MAX_TOKENS
        step = RetryStep.PAIR if pair_helps else RetryStep.AGGREGATED
        self.follow(router, router.recovery.start(resume), step)

    def facts(self) -> Facts:
        return Facts(self.now, len(self.client))

    def follow(self, router: ModelRouter, decision: Any, step: RetryStep | None = None) -> None:
        """Perform decisions of recovery, as `Failover` and serve.py do, with the one worker of each
        role. `step`: by which workers are reserved."""
        recovery, router.reserved, router.waits_until = router.recovery, None, None
        assert recovery is not None
        while True:
            match decision:
                case RunAttempt():
                    assert step is not None, "an attempt without workers"
                    if router.attempts:
                        recovery.continued(step, len(self.client))
                    self.run_attempt(router, step)
                    return
                case GiveUp():
                    self.ending = "failed"
                    return
                case ReserveWorkers(constraints):
                    step = constraints.step
                    roles = {"p", "d"} if step is RetryStep.PAIR else {"d"}
                    if constraints.without & roles:
                        decision = recovery.refused(Unavailable("excluded"), self.facts())
                    else:
                        decision = recovery.reserved(self.facts())
                case Confirm():
                    deaths = sum(not x.is_refuted for x in router.suspicion.deaths)
                    decision = recovery.confirmed(deaths, self.facts())
                case Ping():
                    router.reserved = step
                    return
                case Wait(until):
                    router.waits_until = until
                    return

    def pinged(self, number: int, silent: str | None = None) -> None:
        router = self.routers[number]
        assert router.recovery is not None
        self.follow(router, router.recovery.pinged(silent, self.facts()), router.reserved)

    def waited(self, number: int) -> None:
        router = self.routers[number]
        assert router.recovery is not None
        # Nobody was ready for as long as a request may wait.
        self.is_late |= self.now >= LIMITS.queue.timeout_s
        self.follow(router, router.recovery.waited(self.facts()))

    def run_attempt(self, router: ModelRouter, step: RetryStep) -> None:
        """Start an attempt with the one worker of each role."""
        resume = len(self.client)
        router.attempts += 1
        router.tid = f"r{router.number}a{router.attempts}"
        is_pair = router.is_pair = step is RetryStep.PAIR
        router.handoff = Handoff(MAX_TOKENS, resume, "d", "p" if is_pair else None)
        if is_pair:
            incarnation = self.workers["p"].incarnation
            self.command(router, "d", ("decode", router.number, router.tid, resume, incarnation))
            self.command(router, "p", ("prefill", router.number, router.tid, resume))
        else:
            self.command(router, "d", ("aggregated", router.number, router.tid, resume))

    def command(self, router: ModelRouter, worker: str, command: Any) -> None:
        """Send a command. It is lost if the connection has ended."""
        if router.seen[worker] == self.conns[worker, router.number]:
            self.workers[worker].commands.append(command)

    def close(self, router: ModelRouter) -> None:
        """End the attempt, as `Attempt.run` does."""
        if (handoff := router.handoff) is not None:
            for worker, side in SIDES.items():
                if handoff.is_open(side) or handoff.kv_held_by is side:
                    self.command(router, worker, ("cancel", router.number, router.tid))
        router.handoff = None

    def forget_request(self, router: ModelRouter) -> None:
        """End the request at a router whose client has left, or that has died."""
        router.recovery = router.reserved = router.waits_until = None

    def router_reads(self, worker: str, number: int) -> None:
        router, event = self.routers[number], self.deltas[worker, number].pop(0)
        if event[0] == "lost":
            router.seen[worker] = event[1]
        side, handoff = SIDES[worker], router.handoff
        if handoff is None:
            return
        if event[0] == "lost":
            if handoff.is_open(side):
                died = ModelMember(worker, event[1], event[2])
                assert router.recovery is not None
                router.recovery.died(Death(died, False, (died,)), len(self.client))
            self.perform(router, handoff.on_lost(side, WorkerFailed(f"{worker} is lost")))
        elif event[0] == router.tid:
            self.perform(router, handoff.on_delta(side, event[1]))

    def perform(self, router: ModelRouter, actions: Any) -> None:
        for action in actions:
            match action:
                case StreamDelta():
                    self.client += action.token_ids
                case Finished(delta):
                    self.client += delta.token_ids
                    self.close(router)
                    self.ending = "finished"
                case Failed():
                    recovery, failed = router.recovery, action
                    assert recovery is not None
                    self.close(router)
                    workers = ("p", "d") if router.is_pair else ("d",)
                    pair = ("p", "d") if router.is_pair else None
                    self.follow(router, recovery.failed(failed, workers, pair, self.facts()))
                case Exported():
                    raise AssertionError("the world has no export")

    def move_client(self) -> None:
        """Move the client to the second router, which continues after the client's tokens."""
        self.active = 1
        if not self.ending:
            self.begin(self.routers[1])

    # -- workers

    def emit(self, worker: str, request: EngineRequest, delta: StreamDelta) -> None:
        if self.routers[request.router].alive:
            self.deltas[worker, request.router].append((request.tid, delta))

    def worker_reads(self, worker: str) -> None:
        match self.workers[worker].commands.pop(0):
            case ("prefill", router, tid, resume):
                request = EngineRequest(router, tid, resume)
                self.workers["p"].requests[request.name] = request
                self.do_producer(self.producer.expect(tid, request.name, self.now))
            case ("decode", router, tid, resume, incarnation):
                self.subscribe(EngineRequest(router, tid, resume), incarnation)
            case ("aggregated", router, tid, resume):
                request = EngineRequest(router, tid, resume, has_kv=True)
                self.workers["d"].requests[request.name] = request
            case ("cancel", router, tid):
                self.cancel(worker, f"{router}:{tid}")
            case ("gone", router):
                for name in list(self.workers[worker].requests):
                    if name.startswith(f"{router}:"):
                        self.cancel(worker, name)

    def subscribe(self, request: EngineRequest, incarnation: int) -> None:
        worker = self.workers["d"]
        worker.requests[request.name] = request
        blocks = [worker.take(request) for _ in range(self.chunks)]
        if incarnation != self.workers["p"].incarnation:
            self.consumer.refuse(request.name, "the producer is another one", "transfer_failed")
            return
        usable = [name for name, link in self.links.items() if link.d_up]
        wire = usable[-1] if usable else [*Wire][len(self.links)]
        self.links.setdefault(wire, ModelLink())
        group = GroupBlocks(0, 0, blocks, [0, 1, 0], [0, 1, 0])
        subscription = Subscribe(request.tid, self.chunks * BLOCK, [group])
        wanted = [(wire, subscription, [PLAN.whole(0)])]
        self.do_consumer(self.consumer.subscribe(request.name, wanted, self.now))

    def cancel(self, worker: str, name: str) -> None:
        request = self.workers[worker].requests.get(name)
        if request is None:
            return
        if worker == "p":
            if request.state == "held":
                self.do_producer(self.producer.release(request.tid))
            else:
                self.workers["p"].free(request)
                end = {"held": False, "request_id": name}
                self.do_producer(self.producer.end(request.tid, (), self.now, **end))
        elif request.has_kv:
            self.workers["d"].free(request)
        else:  # its blocks may be written to until the consumer reports an outcome
            request.state = "cancelled"
            self.do_consumer(self.consumer.cancel(request.tid, "cancelled"))

    def prefill_step(self, name: str) -> None:
        worker = self.workers["p"]
        request = worker.requests[name]
        block = worker.take(request)
        worker.memory[block] = self.content(request.tid, len(request.blocks) - 1)
        ready = BLOCK * len(request.blocks)
        self.do_producer(self.producer.progress(request.tid, [request.blocks], ready, self.now))
        if len(request.blocks) == self.chunks:
            request.state = "held"
            token = (FIRST_TOKEN + request.first,)
            end = self.producer.end(request.tid, token, self.now, held=True, request_id=name)
            self.do_producer(end)
            delta = StreamDelta(1, token)
            delta.finish_reason = FinishReason.LENGTH
            self.emit("p", request, delta)

    def content(self, tid: str, index: int) -> Any:
        """Return what a block of a transfer has."""
        return tid, index

    def digest(self, tid: str) -> None:
        while (found := self.producer.undigested(tid)) is not None:
            contents = [self.workers["p"].memory.get(block) for block in found.block_ids]
            self.do_producer(self.producer.digested(found, crc(contents), self.now))

    def decode_step(self, name: str) -> None:
        request = self.workers["d"].requests[name]
        token = FIRST_TOKEN + request.first + request.made
        request.made += 1
        delta = StreamDelta(1, (token,))
        if token == FIRST_TOKEN + MAX_TOKENS - 1:
            delta.finish_reason = FinishReason.LENGTH
            self.workers["d"].free(request)
        self.emit("d", request, delta)

    # -- the KV link

    def do_producer(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Release):
                worker = self.workers["p"]
                request = worker.requests[action.request_id]
                assert request.state == "held", "released blocks that nobody held"
                copied = [x.copying for x in self.links.values() if x.copying and x.p_up]
                read = {block for chunk in copied for block in chunk.block_ids}
                assert not read & {*request.blocks}, "released under a copy"
                worker.free(request)
            elif isinstance(action, DigestBlocks):
                self.digest(action.transfer_id)
            elif self.links[action.link].p_up:
                item = action.message if isinstance(action, Send) else action
                if isinstance(item, Fail):
                    item = Fail(item.transfer_id, REASON)
                self.links[action.link].queue.append(item)

    def do_consumer(self, sends: Any) -> None:
        for send in sends:
            if self.links[send.link].d_up:
                self.links[send.link].to_p.append(send.message)

    def outcome(self) -> None:
        """Report the outcomes of transfers to the decode engine."""
        worker = self.workers["d"]
        for outcome in self.consumer.take_outcomes():
            request = worker.requests[outcome.request_id]
            assert not request.has_kv, "a finished transfer ended again"
            writing = [x.writing for x in self.links.values() if x.writing is not None]
            written = {block for _, place, _ in writing for block in place.block_ids}
            assert not written & {*request.blocks}, "ended under a write"
            if isinstance(outcome, Received):
                contents = [worker.memory[block] for block in request.blocks]
                wanted = [self.content(request.tid, n) for n in range(self.chunks)]
                assert contents == wanted, "wrong KV"
                assert outcome.token_ids == (FIRST_TOKEN + request.first,)
                request.has_kv, request.made = True, 1
                if request.state == "cancelled":
                    worker.free(request)
                continue
            worker.free(request)
            delta = StreamDelta(1, ())
            delta.finish_reason = FinishReason.ERROR
            delta.error = ErrorInfo(outcome.code, "")
            self.emit("d", request, delta)

    def producer_writes(self, wire: Wire) -> None:
        link = self.links[wire]
        if link.copying is not None:
            chunk, link.copying = link.copying, None
            contents = [self.workers["p"].memory.get(block) for block in chunk.block_ids]
            size = len(contents)
            message = ChunkReady(chunk.transfer_id, chunk.first, size, size, chunk.block_ids)
            link.to_d.append((message, contents))
            self.do_producer(self.producer.end_copy(chunk, self.now, 0.0, 1))
            return
        item = link.queue.pop(0)
        if not isinstance(item, SendChunk):
            link.to_d.append((item, []))
        elif self.producer.begin_copy(item):
            link.copying = item

    def producer_reads(self, wire: Wire) -> None:
        message = self.links[wire].to_p.pop(0)
        self.do_producer(self.producer.on_message(wire, message, self.now))

    def consumer_reads(self, wire: Wire) -> None:
        link = self.links[wire]
        if link.writing is not None:
            self.consumer_writes(wire)
            return
        message, contents = link.to_d.pop(0)
        if not isinstance(message, ChunkReady):
            sends = self.consumer.on_message(wire, message, self.now, "sim", is_pull=self.is_pull)
            self.do_consumer(sends)
            return
        try:
            place = self.consumer.begin_chunk(wire, message)
        except ProtocolError:
            self.consumer_down(wire)
            return
        if place is not None:
            owners = {self.workers["d"].owner.get(block) for block in place.block_ids}
            assert len(owners) == 1, "a chunk goes to blocks of two owners"
            names = self.owners_of(message.transfer_id)
            assert owners <= names, "a chunk goes to blocks of another"
            link.writing = (message, place, contents)

    def owners_of(self, tid: str) -> set[str | None]:
        """Return whom the blocks of a transfer may belong to."""
        return {f"{router}:{tid}" for router in (0, 1)}

    def consumer_writes(self, wire: Wire) -> None:
        link, worker = self.links[wire], self.workers["d"]
        (chunk, place, contents), link.writing = link.writing, None
        assert all(worker.owner.get(block) for block in place.block_ids), "written after the end"
        if self.is_pull:
            contents = [self.workers["p"].memory.get(b) for b in chunk.block_ids]
        if self.damages:
            self.damages, contents = 0, ["damaged"] * len(contents)
        worker.memory |= dict(zip(place.block_ids, contents, strict=True))
        sends = self.consumer.end_chunk(wire, chunk, self.now, 0.0, crc(contents))
        self.do_consumer(sends)

    def consumer_down(self, wire: Wire) -> None:
        link = self.links[wire]
        if link.writing is not None:  # the reader thread ends its write first
            self.consumer_writes(wire)
        link.d_up, link.to_d = False, []
        self.do_consumer(self.consumer.link_down(wire, "down"))

    def producer_down(self, wire: Wire) -> None:
        link = self.links[wire]
        link.p_up, link.to_p, link.queue = False, [], []
        chunk, link.copying = link.copying, None
        self.do_producer(self.producer.link_down(wire))
        if chunk is not None:
            self.do_producer(self.producer.end_copy(chunk, self.now, 0.0, 0))

    # -- faults

    def fault(self, kind: str, *where: Any) -> None:
        self.faults -= 1
        match kind:
            case "kill_p" | "kill_d":
                self.kill(kind[-1])
            case "kill_router":
                self.routers[0].alive = False
                self.routers[0].handoff = None
                self.forget_request(self.routers[0])
                for worker in "pd":
                    self.deltas[worker, 0] = []
                    self.workers[worker].commands.append(("gone", 0))
            case "break_p" | "break_d":
                self.cut(kind[-1], self.active)
                self.workers[kind[-1]].commands.append(("gone", self.active))
            case "break_link":
                self.producer_down(where[0])
            case "lose" | "double":
                messages = where[0](self)
                messages[:1] = [] if kind == "lose" else [messages[0], messages[0]]
            case "damage":
                self.damages = 1
            case "pause":
                self.pass_time(RECEIVE_S)
            case "leave":
                self.close(self.routers[0])
                self.forget_request(self.routers[0])
                self.move_client()
            case "silent":
                self.pinged(self.active, "d")
            case "stale_id":
                # The other router uses the transfer id of an attempt for its own prefill.
                self.has_stale_id = True
                tid = self.routers[0].tid
                self.workers["p"].commands.append(("prefill", 1, tid, len(self.client)))

    def cut(self, worker: str, router: int, *, is_dead: bool = False) -> None:
        self.losses += router == self.active
        self.conns[worker, router] += 1
        if self.routers[router].alive:
            self.deltas[worker, router].append(("lost", self.conns[worker, router], is_dead))

    def kill(self, worker: str) -> None:
        """End a worker and replace it at once. Its sent messages still arrive."""
        for router in (0, 1):
            self.cut(worker, router, is_dead=True)
        incarnation = self.workers[worker].incarnation + 1
        self.workers[worker] = type(self.workers[worker])(incarnation)
        if worker == "p":
            self.producer = self.new_producer()
            for link in self.links.values():
                link.p_up, link.to_p, link.queue, link.copying = False, [], [], None
        else:
            self.consumer = Consumer(RECEIVE_S)
            for link in self.links.values():
                link.d_up, link.to_d, link.writing = False, [], None

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do_producer(self.producer.tick(self.now))
        self.do_consumer(self.consumer.tick(self.now))

    # -- possible actions

    def enabled(self) -> list[Action]:
        """Return all possible next actions, without faults."""
        found: list[Action] = [("worker_reads", x) for x in "pd" if self.workers[x].commands]
        found += [("router_reads", *key) for key, waiting in self.deltas.items() if waiting]
        for name, request in self.workers["p"].requests.items():
            if request.state == "running":
                found.append(("prefill_step", name))
        for name, request in self.workers["d"].requests.items():
            if request.state == "running" and request.has_kv:
                found.append(("decode_step", name))
        if self.consumer.has_outcomes:
            found.append(("outcome",))
        for router in self.routers:
            if router.reserved is not None:
                found.append(("pinged", router.number))
            if router.waits_until is not None:
                found.append(("waited", router.number))
        if not self.routers[0].alive and self.active == 0:
            found.append(("move_client",))
        return found + self.enabled_on_links()

    def enabled_on_links(self) -> list[Action]:
        found: list[Action] = []
        for wire, link in self.links.items():
            if link.p_up and (link.queue or link.copying is not None):
                found.append(("producer_writes", wire))
            if link.p_up and link.to_p:
                found.append(("producer_reads", wire))
            if link.d_up and (link.to_d or link.writing is not None):
                found.append(("consumer_reads", wire))
            # The end that is up reads the earlier messages, then notices the break.
            if link.d_up and not link.p_up and not link.to_d and link.writing is None:
                found.append(("consumer_down", wire))
            if link.p_up and not link.d_up and not link.to_p:
                found.append(("producer_down", wire))
        return found

    def possible_faults(self) -> list[Action]:
        if not self.faults or self.ending:
            return []
        kinds = ["kill_p", "kill_d", "pause"]
        kinds += [] if self.damages else ["damage"]
        if self.routers[self.active].alive:
            kinds += ["break_p", "break_d"]
        if self.routers[self.active].reserved is not None:
            kinds += ["silent"]
        if self.active == 0 and self.routers[0].alive:
            kinds += ["kill_router", "leave"]
            kinds += [] if self.has_stale_id else ["stale_id"]
        found: list[Action] = [("fault", kind) for kind in kinds if kind in self.kinds]
        for wire, link in self.links.items():
            if link.p_up and link.d_up and "break_link" in self.kinds:
                found.append(("fault", "break_link", wire))
            for end, messages in (("to_p", link.to_p), ("to_d", link.to_d)):
                on_link = [x for x in ("lose", "double") if messages and x in self.kinds]
                found += [("fault", x, FrameQueue(wire, end)) for x in on_link]
        return found

    def do(self, action: Action) -> None:
        getattr(self, action[0])(*action[1:])
        assert self.client == [*range(FIRST_TOKEN, FIRST_TOKEN + len(self.client))], "tokens"
        self.forget_texts()

    def forget_texts(self) -> None:
        """Clear reasons and totals, which influence no decision, so that more states are equal."""
        tombstones = self.producer._tombstones
        tombstones.update(dict.fromkeys(tombstones, "ended"))
        self.producer.expired_holds = self.producer.refused_subscriptions = 0
        self.consumer.timeouts = self.consumer.digest_mismatches = 0
        for transfer in self.consumer._transfers.values():
            if transfer.failure is not None:
                transfer.failure = replace(transfer.failure, reason=REASON)
        for router in self.routers:
            if (recovery := router.recovery) is not None:
                recovery.reason, recovery._cause = "", CAUSE
                recovery._refused = recovery._refused and CAUSE
                recovery.retries[:] = [""] * len(recovery.retries)

    def without_effect(self) -> Action | None:
        """Return a read of an obsolete message, or None. It has no other effect, so its order does
        not matter and it is done first."""
        for (worker, number), waiting in self.deltas.items():
            router = self.routers[number]
            if waiting and waiting[0][0] not in ("lost", router.tid):
                return "router_reads", worker, number
        for name, worker in self.workers.items():
            match worker.commands[:1]:
                case [("cancel", number, tid)] if f"{number}:{tid}" not in worker.requests:
                    return "worker_reads", name
        for wire, link in self.links.items():
            match link.to_d[:1]:
                case [(message, _)] if (
                    link.d_up
                    and link.writing is None
                    and message.transfer_id not in self.consumer._transfers
                ):
                    return "consumer_reads", wire
        return None

    def settle(self) -> None:
        """Run until everything has ended, including timeouts and holds. Assert that nothing is
        left."""
        for _ in range(6):
            while actions := self.enabled():
                self.do(actions[0])
            self.pass_time(RECEIVE_S)
        # The router gives up a request after several lost workers, because it may be the cause, and
        # one that has waited too long for a worker.
        if self.ending != "failed" or not (self.losses >= 2 or self.is_late):
            assert self.ending == "finished", f"the answer {self.ending or 'has no end'}"
            assert len(self.client) == MAX_TOKENS, "tokens are missing"
        for name, worker in self.workers.items():
            assert not worker.requests, f"{name} keeps {[*worker.requests]}"
            assert not worker.in_use, f"{name} keeps blocks {worker.in_use}"
        assert len(self.producer) == 0, "the producer keeps transfers"
        assert len(self.consumer) == 0, "the consumer keeps transfers"


@dataclass(frozen=True)
class FrameQueue:
    """One direction of a KV link."""

    wire: Wire
    end: str

    def __call__(self, world: HandoffWorld) -> list[Any]:
        found: list[Any] = getattr(world.links[self.wire], self.end)
        return found
