"""A model of a copy of cached KV before a prompt is computed, for the explorer: the model of a
hand-off, with caches of prefixes, and with a copy before the request's first attempt. The router's
account of the copy is the real PrefixFetcher's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from pdserve.errors import DeadlineExceeded
from pdserve.types import (
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    PhaseReport,
    SamplingParams,
    StreamDelta,
    TransferReport,
)
from router.attempt import copies
from router.attempt.handoff import End, Failed, Finished, Handoff, Side
from router.attempt.recovery import Recovery, RetryStep
from router.attempt.streams import Answer
from router.placement.values import MemberState, PrefixFetch
from tests.support.handoff_model import (
    BLOCK,
    FIRST_TOKEN,
    LIMITS,
    MAX_TOKENS,
    EngineRequest,
    HandoffWorld,
    ModelRouter,
    ModelWorker,
)

if TYPE_CHECKING:
    from tests.support.explorer import Action

FAULTS = (
    *("kill_p", "kill_d", "kill_router", "break_p", "break_d", "break_link"),
    *("lose", "double", "damage", "pause", "leave", "evict", "late"),
)
COPY = "copy"  # the transfer id
COPIED_TOKENS = 2  # the holder's, and one that proves that the worker has the KV
CACHE = "cache"  # the owner of blocks that no request uses


@dataclass(slots=True)
class CachingWorker(ModelWorker):
    """A worker that keeps the prompt's blocks after their request. `cached`: by number in the
    prompt."""

    cached: dict[int, int] = field(default_factory=dict)

    @property
    def in_use(self) -> dict[int, str]:
        return {block: owner for block, owner in self.owner.items() if owner != CACHE}

    def free(self, request: EngineRequest) -> None:
        if request.tid == COPY and request.has_kv:
            for index, block in enumerate(request.blocks):
                assert self.owner[block] == request.name, "a block was released by another"
                self.owner[block], self.cached[index] = CACHE, block
            request.blocks = []
        ModelWorker.free(self, request)


class CopyWorld(HandoffWorld):
    """The whole state. `p` holds the prompt's KV, `d` computes the prompt. Faults happen during the
    copy. `counted`: tokens that the router counted as copied, None during the copy. `report`: what
    the worker reported with the last delta of the copy."""

    def __init__(self, faults: int, kinds: tuple[str, ...], *, chunks: int, is_pull: bool) -> None:
        self.counted: int | None = None
        self.report: PhaseReport | None = None
        super().__init__(faults, kinds, chunks=chunks, is_pull=is_pull)
        self.workers = {"p": CachingWorker(), "d": CachingWorker()}
        holder = self.workers["p"]
        assert isinstance(holder, CachingWorker)
        for index in range(chunks):
            holder.cached[index], holder.owner[index] = index, CACHE
            holder.memory[index] = self.content(COPY, index)
        self.copy(self.routers[0])

    def cached(self, name: str) -> dict[int, int]:
        worker = self.workers[name]
        assert isinstance(worker, CachingWorker)
        return worker.cached

    def content(self, tid: str, index: int) -> Any:
        return ("prompt", index) if tid == COPY else (tid, index)

    # -- the router

    def begin(self, router: ModelRouter) -> None:
        """Start the request at one worker, except at the first router before its copy."""
        if router.number or self.counted is not None:
            resume = len(self.client)
            router.recovery = Recovery(
                LIMITS, router.suspicion, max_tokens=MAX_TOKENS, resumed=resume
            )
            self.follow(router, router.recovery.start(resume), RetryStep.AGGREGATED)

    def copy(self, router: ModelRouter) -> None:
        # The copy does not count as an attempt of the request.
        router.recovery = Recovery(LIMITS, router.suspicion, max_tokens=MAX_TOKENS, resumed=0)
        router.tid, router.is_pair = COPY, True
        router.handoff = Handoff(COPIED_TOKENS, 0, "d", "p")
        incarnation = self.workers["p"].incarnation
        self.command(router, "d", ("decode", 0, COPY, 0, incarnation))
        self.command(router, "p", ("prefill", 0, COPY, 0))

    @property
    def is_copying(self) -> bool:
        router = self.routers[0]
        return self.active == 0 and router.alive and self.counted is None

    def router_reads(self, worker: str, number: int) -> None:
        tid, *rest = self.deltas[worker, number][0]
        if tid == COPY and worker == "d" and rest[0].finish_reason is not None:
            self.report = rest[0].report
        super().router_reads(worker, number)

    def perform(self, router: ModelRouter, actions: Any) -> None:
        if router.tid != COPY:
            super().perform(router, actions)
            return
        for action in actions:
            if isinstance(action, Finished | Failed):
                self.end_copy(router, action)

    def end_copy(self, router: ModelRouter, end: End) -> None:
        self.close(router)
        self.counted = counted_tokens(end, self.report, self.chunks)
        if self.workers["d"].incarnation == 0:  # else it has died since
            assert self.counted <= BLOCK * len(self.cached("d")), "counted what is not cached"
        self.begin(router)

    # -- the workers

    def worker_reads(self, worker: str) -> None:
        command = self.workers[worker].commands[0]
        super().worker_reads(worker)
        if command[0] == "aggregated":
            memory, cached = self.workers[worker].memory, self.cached(worker)
            for index, block in cached.items():
                assert memory[block] == self.content(COPY, index), "wrong KV is cached"

    def prefill_step(self, name: str) -> None:
        worker, request = self.workers["p"], self.workers["p"].requests[name]
        if request.tid != COPY:
            super().prefill_step(name)
            return
        cached = self.cached("p")
        if len(cached) < max(1, self.chunks - 1):  # as the router demands
            worker.free(request)
            end = {"held": False, "request_id": name}
            self.do_producer(self.producer.end(COPY, (), self.now, **end))
            delta = StreamDelta(1, ())
            delta.finish_reason = FinishReason.ERROR
            delta.error = ErrorInfo("transfer_failed", "")
            self.emit("p", request, delta)
            return
        for index in range(self.chunks):
            if index in cached:
                block = cached.pop(index)
                worker.owner[block] = name
                request.blocks.append(block)
            else:
                worker.memory[worker.take(request)] = self.content(COPY, index)
        request.has_kv, request.state = True, "held"
        ready = BLOCK * self.chunks
        self.do_producer(self.producer.progress(COPY, [request.blocks], ready, self.now))
        token = (FIRST_TOKEN,)
        ended = self.producer.end(COPY, token, self.now, held=True, request_id=name)
        self.do_producer(ended)
        delta = StreamDelta(1, token)
        delta.finish_reason = FinishReason.LENGTH
        self.emit("p", request, delta)

    def decode_step(self, name: str) -> None:
        request = self.workers["d"].requests[name]
        if request.tid != COPY:
            super().decode_step(name)
            return
        delta = StreamDelta(1, (FIRST_TOKEN + request.made,))
        delta.finish_reason = FinishReason.LENGTH
        transfer = TransferReport(0.0, 0.0, 0, self.chunks, "sim")
        delta.report = PhaseReport(transfer=transfer)
        self.workers["d"].free(request)
        self.emit("d", request, delta)

    # -- faults

    def possible_faults(self) -> list[Action]:
        if not self.is_copying or not self.faults:
            return []
        cached = self.cached("p")
        more = ["late"] + ["evict"] * bool(cached)
        found: list[Action] = [("fault", x) for x in more if x in self.kinds]
        return super().possible_faults() + found

    def fault(self, kind: str, *where: Any) -> None:
        router, holder = self.routers[0], self.workers["p"]
        match kind:
            case "late":
                self.faults -= 1
                assert router.handoff is not None
                router.handoff.stop()
                self.end_copy(router, Failed(Side.DECODE, DeadlineExceeded("late")))
            case "evict":
                self.faults -= 1
                block = self.cached("p").pop(max(self.cached("p")))
                del holder.owner[block]
                holder.memory[block] = "other"
            case _:
                super().fault(kind, *where)


class EndedAttempt:
    """An attempt whose end is known."""

    end: End
    report: PhaseReport | None

    def __init__(self, *values: Any) -> None:
        self._answer: Answer = values[4]

    async def run(self) -> End:
        stream: Any = SimpleNamespace(report=self.report)
        self._answer.streams.append(stream)
        return self.end


def counted_tokens(end: End, report: PhaseReport | None, chunks: int) -> int:
    """Return how many tokens the router counts as copied after a copy with this end."""
    topology: Any = None
    info = SimpleNamespace(topology=topology, block_size=BLOCK)
    holder = SimpleNamespace(state=MemberState.READY, info=info)
    ignored: Any = mock.Mock()
    fleet: Any = SimpleNamespace(members={"p": holder})
    fetcher = copies.PrefixFetcher(fleet, ignored, ignored, ignored, ignored)
    tokens = BLOCK * chunks
    plan = PrefixFetch("p", tokens, tokens, 0, 0.1, 1.0, 0.1, 1)
    reservation: Any = SimpleNamespace(fetch=plan, members=[SimpleNamespace(worker_id="d")])
    request = GenerateRequest("r", "m", tuple(range(tokens + 1)), SamplingParams())
    answer = Answer(mock.Mock(), MAX_TOKENS, [])
    attempt = type("Attempt", (EndedAttempt,), {"end": end, "report": report})
    with mock.patch.multiple(copies, Attempt=attempt, Reservation=mock.Mock(), pair=mock.Mock()):
        asyncio.run(fetcher.fetch(request, answer, reservation))
    assert not fetcher._running, "the router waits for a copy that has ended"
    return 0 if answer.fetched is None else answer.fetched.tokens
