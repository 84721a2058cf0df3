"""The scenarios of the failure matrix. Each injects one kind of fault while requests run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks.batches import BatchClient
from benchmarks.chaos import hooks
from benchmarks.chaos.load import CLEAN, ObservedAnswer, ObservedChoice
from benchmarks.chaos.service import LOOK_S
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Mapping

    from benchmarks.chaos.load import Clients, Question
    from benchmarks.chaos.service import ServiceUnderTest
    from pdserve.v1.worker_pb2 import WorkerEntry

REPEATED: Final = 1_000_000  # added to a request's number each time that it is sent again
# Lines of each greedy question in a batch, so many that the batch outlives both routers. Line
# numbers are above all request numbers.
BATCH_COPIES: Final = 40
BATCH_FIRST: Final = 1000 * REPEATED


class MissedError(BenchError):
    """The fault did not affect anything. The scenario proves nothing and is repeated."""


@dataclass(slots=True)
class Run:
    """Requests that are sent at a rate, and the fault that is injected meanwhile.

    `allowed`: requests that the fault itself ends (a client that disconnects, the streams of a
    killed router). Requests sent before `workers_s` may end with a retryable error. Nothing is sent
    while `may_send` is cleared, or while `at_once` requests are open (0: no limit). `points`:
    where the clients of requests left.
    """

    service: ServiceUnderTest
    clients: Clients
    questions: Mapping[int, Question]
    rate_per_s: float
    rng: random.Random
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    answers: dict[int, ObservedAnswer] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    struck_s: float = 0.0
    workers_s: float = 0.0
    allowed: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    at_once: int = 0
    points: dict[int, str] = field(default_factory=dict)

    async def load(self) -> None:
        """Send all requests and wait until they end."""
        self.may_send.set()
        try:
            for number in self.questions:
                await self.may_send.wait()
                while self.at_once and len(self.open()) >= self.at_once:
                    await asyncio.wait(self.tasks.values(), timeout=LOOK_S)
                self.send(number)
                await asyncio.sleep(1 / self.rate_per_s)
            while self.open():
                await asyncio.wait(self.tasks.values(), timeout=0.05)
        finally:
            self.is_over = True
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def send(self, number: int, *, slow_s: float = 0.0) -> None:
        """Send a question now. If it was sent before, the request gets a new number."""
        question = self.questions[number % REPEATED]
        while number in self.answers:
            number += REPEATED
        answer = self.answers[number] = ObservedAnswer(number, time.monotonic(), slow_s)
        self.tasks[number] = asyncio.create_task(self.clients.ask(question, answer))

    @property
    def aborts(self) -> Counter[str]:
        """Number of aborted requests by the point at which their clients left."""
        return Counter(x for n, x in self.points.items() if self.answers[n].ending == "aborted")

    def open(self) -> list[ObservedAnswer]:
        return [x for x in self.answers.values() if x.ending == "open"]

    def allows(self, answer: ObservedAnswer) -> bool:
        """Return True if this request may have failed."""
        lacked_workers = answer.sent_s < self.workers_s and answer.heard_s >= self.struck_s
        return answer.number in self.allowed or (lacked_workers and answer.code in CLEAN)

    def strike(self) -> None:
        self.struck_s = self.struck_s or time.monotonic()

    async def until(self, condition: Callable[[], object], text: str) -> None:
        """Wait until `condition` is true. Raises MissedError if all requests end first."""
        while not condition():
            if self.is_over:
                raise MissedError(f"there never were {text}")
            await asyncio.sleep(LOOK_S)

    async def until_open(self, count: int) -> None:
        """Wait until `count` answers have begun and are still open. Send additional requests to a
        fast service, which would never have that many open at the normal rate."""

        def begun() -> bool:
            answers = self.open()
            if self.answers and len(answers) < 2 * count:
                self.send(self.rng.choice(sorted(self.answers)))
            return sum(bool(answer.choices) for answer in answers) >= count

        await self.until(begun, f"{count} open answers")

    async def catch(self, role: str) -> int:
        """Freeze a worker of a role that has work, and return its pid. Raises MissedError."""
        while not self.is_over:
            for entry in await self.service.ready_workers(role):
                if not _work(entry, role):
                    continue
                name, pid = entry.info.worker_id, entry.info.pid
                os.kill(pid, signal.SIGSTOP)
                # Wait until everything that it sent before has reached the router.
                await asyncio.sleep(5 * LOOK_S)
                count = _work((await self.service.entries()).get(name), role)
                if count:
                    self.strike()
                    self.notes.append(f"{name} with {count} requests")
                    return pid
                _thaw(pid)
            await asyncio.sleep(LOOK_S / 4)
        raise MissedError(f"no {role} worker was ever at work")


def _work(entry: WorkerEntry | None, role: str) -> int:
    """Return the number of a worker's requests, or 0 if they are not in the phase of `role`."""
    if entry is None or (role == "prefill" and not entry.outstanding_tokens):
        return 0
    return entry.outstanding_requests


def _thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def _kill(run: Run, role: str) -> None:
    run.service.end(await run.catch(role))


async def _drain(run: Run, role: str) -> None:
    """Drain the worker of a role with the most requests. Raises MissedError if they all end."""
    await run.until_open(2)
    ready = await run.service.ready_workers(role)
    worker = max(ready, key=lambda x: x.outstanding_requests)
    if not worker.outstanding_requests:
        raise MissedError(f"no {role} worker was at work")
    run.strike()
    run.notes.append(f"{worker.info.worker_id} with {worker.outstanding_requests} requests")
    await run.service.drain(worker.info.worker_id)


async def _freeze(run: Run, role: str, seconds: float) -> None:
    pid = await run.catch(role)
    try:
        await asyncio.sleep(seconds)
    finally:
        _thaw(pid)


async def _damage(run: Run, order: str) -> None:
    await run.until_open(1)
    directory, entries = run.service.directory, await run.service.entries()
    pid = entries["prefill-0"].info.pid
    run.strike()
    hooks.give(directory, pid, order)
    try:
        await asyncio.sleep(2.0)
        await run.until(lambda: hooks.hits(directory, pid), f"occasions to {order}")
    finally:
        hooks.give(directory, pid, "")
    run.notes.append(f"{hooks.hits(directory, pid)} times on prefill-0")


async def _kill_all(run: Run, roles: str) -> None:
    """Kill all workers of some roles. Requests continue to arrive meanwhile."""
    await run.until_open(2)
    doomed = [x for role in roles.split(",") for x in await run.service.ready_workers(role)]
    await run.catch("decode")
    run.notes.append(f"{len(run.open())} answers open when {len(doomed)} workers were killed")
    run.workers_s = float("inf")
    for entry in doomed:
        run.service.end(entry.info.pid)
    for role in ("prefill", "decode"):
        while not await run.service.ready_workers(role):  # noqa: ASYNC110 - only polling works
            await asyncio.sleep(LOOK_S)
    run.workers_s = time.monotonic()


async def _kill_router(run: Run) -> None:
    """Kill a router. If it is the only one, its open streams are lost, and new requests wait until
    it has restarted."""
    await run.until_open(2)
    pid, *others = run.service.router_pids()
    run.strike()
    run.service.end(pid)
    run.notes.append(f"{len(run.open())} streams open")
    if not others:
        run.may_send.clear()
        run.allowed |= {answer.number for answer in run.open()}
        await run.service.until_whole()
        run.may_send.set()


async def _kill_router_batch(run: Run) -> None:
    """Kill each router once while a batch of the greedy questions runs. The batch's lines are
    checked as answers. A line that is there twice is a failure."""
    await run.until_open(1)
    greedy = [question for question in run.questions.values() if question.kind == "greedy"]
    bodies = {
        f"{BATCH_FIRST + copy * REPEATED + question.number}": {
            **run.clients.body(question),
            "stream": False,
            "stream_options": None,
        }
        for copy in range(BATCH_COPIES)
        for question in greedy
    }
    async with BatchClient(run.service.ready["http"]) as batches:
        batch = await batches.begin(bodies)
        for number in range(len(run.service.router_pids())):
            counts = (await batches.get(batch))["request_counts"]
            if counts["completed"] == len(bodies):
                raise MissedError("the batch was over before a router was killed")
            run.notes.append(f"{counts['completed']} of {len(bodies)} lines")
            run.strike()
            run.service.end(run.service.router_pids()[number])
            await run.service.until_whole()
        await batches.until(batch, lambda x: x["status"] not in ("validating", "in_progress"))
        for name, body in await batches.answers(batch):
            is_new = int(name) not in run.answers
            answer = run.answers[int(name)] = ObservedAnswer(int(name), time.monotonic())
            choice = body["choices"][0]
            tokens, text = choice["token_ids"], choice["text"]
            answer.choices[0] = ObservedChoice(tokens, text, choice["finish_reason"])
            answer.completion_tokens = body["usage"]["completion_tokens"]
            answer.end("ok" if is_new else "failed", "" if is_new else "it was answered twice")
        for name in bodies.keys() - {f"{number}" for number in run.answers}:
            lost = run.answers[int(name)] = ObservedAnswer(int(name), time.monotonic())
            lost.end("failed", "no answer to this line")


def _leaves(rng: random.Random, longest: int) -> tuple[str, int, float]:
    """Return where a client leaves: the name of the point, and the tokens and seconds after
    which."""
    points = {
        "at once": (0, rng.uniform(0.0, 0.02)),
        "in prefill": (0, rng.uniform(0.02, 0.6)),
        "first token": (1, rng.choice((0.0, 0.0, 0.01, 0.05))),
        "in decode": (rng.randrange(2, longest), 0.0),
        "last token": (longest - rng.randrange(2), 0.0),
    }
    point = rng.choice(sorted(points))
    return (point, *points[point])


async def abort(run: Run) -> None:
    """Disconnect the clients of 60 % of the requests, each at some point of its answer. Half of
    them come back at once and ask the same again."""
    decided: set[int] = set()
    leaving: dict[int, tuple[str, int, float]] = {}
    while not run.is_over:
        for answer in run.open():
            number, now = answer.number, time.monotonic()
            if number not in decided:
                decided.add(number)
                if run.rng.random() < 0.6:
                    longest = run.questions[number % REPEATED].sampling.max_tokens or 1
                    leaving[number] = _leaves(run.rng, longest)
            _, tokens, after_s = leaving.get(number, ("", 0, float("inf")))
            if answer.received_tokens >= tokens and now - answer.sent_s >= after_s:
                run.strike()
                run.allowed.add(number)
                run.points[number] = leaving.pop(number)[0]
                run.tasks[number].cancel()
                if number < REPEATED and run.rng.random() < 0.5:
                    run.send(number)
        await asyncio.sleep(0.005)
    aborted = {n for n, x in run.answers.items() if x.ending == "aborted"}
    if not aborted:
        raise MissedError("every answer ended before its client left")
    run.allowed &= aborted  # a request that failed before its client disconnected is a failure


async def _slow_readers(run: Run) -> None:
    await run.until_open(4)
    run.strike()
    for answer in run.open()[:4]:
        run.send(answer.number, slow_s=0.1)


async def _rolling_restart(run: Run) -> None:
    """Restart the processes one after the other, under continuous requests."""
    await run.until_open(2)
    run.may_send.clear()
    asking = asyncio.create_task(_keep_asking(run))
    try:
        run.strike()
        for name in list(run.service.pids):
            entries = await run.service.entries()
            run.service.end(entries[name].info.pid, signal.SIGTERM)
            await run.service.until_whole()
        for number in range(len(run.service.router_pids())):
            run.service.end(run.service.router_pids()[number], signal.SIGTERM)
            await run.service.until_whole()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        run.may_send.set()


async def _keep_asking(run: Run) -> None:
    numbers = sorted(run.answers)
    while True:
        if len(run.open()) < 4:
            run.send(run.rng.choice(numbers))
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fault scenario. `what`: description in the table. `config`: dotted configuration keys of
    this scenario only. `model`: also of the engine that computes the right answers. A path in them
    that begins with `{models}` is in the folder of checkpoints, which must have `files`. `kinds` of
    requests: all, or these; `at_once`: open at a time; see make_questions for `adapters` and
    `sessions`. `copies_always`: see hooks."""

    name: str
    what: str
    run: Callable[[Run], Awaitable[None]]
    config: tuple[tuple[str, Any], ...] = ()
    needs_vllm: bool = False
    model: tuple[tuple[str, Any], ...] = ()
    files: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    sessions: int = 0
    at_once: int = 0
    copies_always: bool = False


_TCP: Final = (("worker.kv.transports", ("tcp",)),)
_TWO: Final = (("up.routers", 2),)
_AGGREGATED: Final = tuple(
    (f"up.{role}.workers", count)
    for role, count in (("prefill", 0), ("decode", 0), ("aggregated", 2))
)
_MIXED: Final = tuple((f"up.{role}.workers", 1) for role in ("prefill", "decode", "aggregated"))
_DROP, _CORRUPT = partial(_damage, order="drop"), partial(_damage, order="corrupt")
_ALL: Final = (
    Scenario("kill_prefill", "SIGKILL to a prefill worker at work", partial(_kill, role="prefill")),
    Scenario("kill_decode", "SIGKILL to a decode worker at work", partial(_kill, role="decode")),
    Scenario("drain_decode", "a planned drain; answers move", partial(_drain, role="decode")),
    Scenario("freeze_prefill", "SIGSTOP for 4 s", partial(_freeze, role="prefill", seconds=4)),
    Scenario("freeze_decode", "SIGSTOP for 4 s", partial(_freeze, role="decode", seconds=4)),
    Scenario(
        "freeze_past_leases",
        "SIGSTOP to a decode worker for 12 s, longer than its lease and the hold of KV blocks",
        partial(_freeze, role="decode", seconds=12),
    ),
    Scenario("drop_transfers", "for 2 s KV links break at a chunk", _DROP, needs_vllm=True),
    Scenario("corrupt_transfers", "for 2 s chunks fail their digest", _CORRUPT, needs_vllm=True),
    Scenario("abort_storm", "60 % of the clients leave, at any point", abort),
    Scenario("slow_clients", "4 clients pause 0.1 s after each piece", _slow_readers),
    Scenario("kill_all_decode", "SIGKILL to all of a role", partial(_kill_all, roles="decode")),
    Scenario("kill_all", "SIGKILL to all", partial(_kill_all, roles="prefill,decode")),
    Scenario("kill_router", "SIGKILL to the only router; its streams are lost", _kill_router),
    Scenario("kill_router_of_two", "clients continue at the other", _kill_router, _TWO),
    Scenario("kill_router_batch", "each of two, while a batch runs", _kill_router_batch, _TWO),
    Scenario("rolling_restart", "SIGTERM to all, one after the other", _rolling_restart, _TWO),
    Scenario(
        "kill_aggregated",
        "SIGKILL to one of two aggregated workers",
        partial(_kill, role="aggregated"),
        _AGGREGATED,
    ),
    Scenario(
        "drain_aggregated",
        "a planned drain of one of two aggregated workers",
        partial(_drain, role="aggregated"),
        _AGGREGATED,
    ),
    Scenario(
        "kill_decode_mixed",
        "SIGKILL to the only decode worker, beside an aggregated one",
        partial(_kill, role="decode"),
        _MIXED,
    ),
    Scenario("drop_transfers_tcp", "as drop_transfers, KV over TCP", _DROP, _TCP, needs_vllm=True),
    Scenario("corrupt_transfers_tcp", "KV over TCP", _CORRUPT, _TCP, needs_vllm=True),
)
SCENARIOS: Final = {scenario.name: scenario for scenario in _ALL}
