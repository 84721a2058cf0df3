"""The scenarios of the failure matrix: each breaks a service in one way while requests run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks.chaos import hooks
from benchmarks.chaos.service import LOOK_S
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from benchmarks.chaos.load import Answer, Load
    from benchmarks.chaos.service import ServiceUnderTest


class MissedError(BenchError):
    """The fault found nothing to hit. The scenario shows nothing and is repeated."""


@dataclass(slots=True)
class Run:
    """One run of a scenario. State: when the fault struck, and which requests it may fail.

    `allowed` are requests that the fault itself ends (a client that leaves, the streams of a router
    that is killed). Requests sent before `workers_s` may end with a clean error.
    """

    service: ServiceUnderTest
    load: Load
    rng: random.Random
    struck_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    allowed: set[int] = field(default_factory=set)
    workers_s: float = 0.0

    def strike(self) -> None:
        self.struck_s = self.struck_s or time.monotonic()

    def allows(self, answer: Answer) -> bool:
        """Return True if this request may have failed."""
        lacked_workers = answer.sent_s < self.workers_s and answer.ended_s >= self.struck_s
        return answer.number in self.allowed or (lacked_workers and answer.is_clean_failure)

    async def until(self, condition: Callable[[], object], text: str) -> None:
        """Wait for it as long as requests run. Raises MissedError."""
        while not condition():
            if self.load.is_over:
                raise MissedError(f"there never were {text}")
            await asyncio.sleep(LOOK_S)

    async def until_open(self, count: int) -> None:
        """Wait until so many answers have begun. A fast service gets more requests than the rate
        brings, or it would never have so many open."""

        def begun() -> bool:
            answers = self.load.open()
            if self.load.answers and len(answers) < 2 * count:
                self.load.send(self.rng.choice(sorted(self.load.answers)))
            return sum(answer.pieces > 0 for answer in answers) >= count

        await self.until(begun, f"{count} open answers")

    async def catch(self, role: str) -> int:
        """Freeze a worker of a role that has work, and return its pid. Raises MissedError."""
        while True:
            for name in await self.service.ready_workers(role):
                if not await self._work_of(name, role):
                    continue
                pid = await self.service.worker_pid(name)
                os.kill(pid, signal.SIGSTOP)
                # What it sent before has reached the router by then.
                await asyncio.sleep(5 * LOOK_S)
                count = await self._work_of(name, role)
                if count:
                    self.strike()
                    self.notes.append(f"{name} with {count} requests")
                    return pid
                _thaw(pid)
            if self.load.is_over:
                raise MissedError(f"no {role} worker was ever at work")
            await asyncio.sleep(LOOK_S / 4)

    async def _work_of(self, name: str, role: str) -> int:
        entry = await self.service.entry(name)
        if entry is None or (role == "prefill" and not entry.outstanding_tokens):
            return 0
        return entry.outstanding_requests

    async def order(self, name: str, order: str, seconds: float) -> None:
        """Let a worker do wrong for `seconds`, and until it did once. Raises MissedError."""
        directory, pid = self.service.directory, await self.service.worker_pid(name)
        self.strike()
        hooks.give(directory, pid, order)
        try:
            await asyncio.sleep(seconds)
            await self.until(lambda: hooks.hits(directory, pid), f"occasions to {order} on {name}")
        finally:
            hooks.give(directory, pid, "")
        self.notes.append(f"{hooks.hits(directory, pid)} times on {name}")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`what` is for a reader of the table. `config` are dotted keys that only this one sets."""

    name: str
    what: str
    run: Callable[[Run], Awaitable[None]]
    config: tuple[tuple[str, Any], ...] = ()
    needs_vllm: bool = False


def _thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def _kill(run: Run, role: str) -> None:
    run.service.end(await run.catch(role))


async def _freeze(run: Run, role: str, seconds: float) -> None:
    pid = await run.catch(role)
    try:
        await asyncio.sleep(seconds)
    finally:
        _thaw(pid)


async def _damage(run: Run, order: str) -> None:
    await run.until_open(1)
    await run.order("prefill-0", order, 2.0)


async def _kill_all(run: Run, roles: str) -> None:
    """A third of the requests is sent while there is no worker of a role."""
    await run.until_open(2)
    names = [name for role in roles.split(",") for name in await run.service.ready_workers(role)]
    pids = [await run.service.worker_pid(name) for name in names]
    await run.catch("decode")
    run.notes.append(f"{len(run.load.open())} answers open when {len(names)} workers were killed")
    for pid in pids:
        run.service.end(pid)
    run.workers_s = float("inf")
    left = run.load.unsent * 2 // 3
    await run.until(lambda: run.load.unsent <= left, "so many requests")
    run.load.may_send.clear()
    await run.service.until_serving()
    run.workers_s = time.monotonic()
    run.load.may_send.set()


async def _kill_router(run: Run) -> None:
    """New requests wait while there is no router; its open streams are lost."""
    await run.until_open(2)
    (pid,) = run.service.router_pids()
    run.load.may_send.clear()
    run.strike()
    run.service.end(pid)
    run.allowed |= {answer.number for answer in run.load.open()}
    run.notes.append(f"{len(run.allowed)} streams open")
    await run.service.until_whole()
    run.load.may_send.set()


async def _kill_router_of_two(run: Run) -> None:
    await run.until_open(4)
    number = await run.service.busiest_router()
    run.strike()
    run.service.end(run.service.router_pids()[number])
    run.notes.append(f"router {number}")


async def _abort(run: Run) -> None:
    """Clients of 60 % of the requests leave."""
    decided: set[int] = set()
    loop = asyncio.get_running_loop()
    while not run.load.is_over:
        for answer in run.load.open():
            if answer.number not in decided:
                decided.add(answer.number)
                if run.rng.random() < 0.6:
                    run.strike()
                    run.allowed.add(answer.number)
                    after_s = run.rng.choice((0.0, 0.01, 0.05, 0.2, 0.5))
                    loop.call_later(after_s, run.load.abort, answer.number)
        await asyncio.sleep(0.005)
    aborted = {n for n, x in run.load.answers.items() if x.ending == "aborted"}
    run.allowed &= aborted  # one that failed before its client left is a failure
    run.notes.append(f"{len(aborted)} aborted")


async def _slow_readers(run: Run) -> None:
    await run.until_open(4)
    run.strike()
    for answer in run.load.open()[:4]:
        run.load.send(answer.number, slow_s=0.1)
    while not run.load.is_over:  # noqa: ASYNC110 - the end of many tasks has no event
        await asyncio.sleep(LOOK_S)


async def _expired_lease(run: Run) -> None:
    await run.until_open(1)
    pid = await run.service.worker_pid("decode-0")
    run.strike()
    hooks.give(run.service.directory, pid, "no renewal")
    try:
        while (entry := await run.service.entry("decode-0")) and entry.state != "lost":  # noqa: ASYNC110 - it has to be asked
            await asyncio.sleep(LOOK_S)
    finally:
        hooks.give(run.service.directory, pid, "")
    run.notes.append(f"{len(run.load.open())} answers open when it was lost")


async def _rolling_restart(run: Run) -> None:
    """Each process is told to end when the one before it is back; requests never stop."""
    await run.until_open(2)
    run.load.may_send.clear()
    asking = asyncio.create_task(_keep_asking(run))
    try:
        run.strike()
        for name in run.service.names:
            run.service.end(await run.service.worker_pid(name), signal.SIGTERM)
            await run.service.until_whole()
        for number in range(len(run.service.http)):
            run.service.end(run.service.router_pids()[number], signal.SIGTERM)
            await run.service.until_whole()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        run.load.may_send.set()


async def _keep_asking(run: Run) -> None:
    numbers = sorted(run.load.answers)
    while True:
        if len(run.load.open()) < 4:
            run.load.send(run.rng.choice(numbers))
        await asyncio.sleep(0.05)


_TCP: Final = (("worker.kv.transports", ("tcp",)),)
_TWO: Final = (("up.routers", 2),)
_DROP, _CORRUPT = partial(_damage, order="drop"), partial(_damage, order="corrupt")
_ALL: Final = (
    Scenario("kill_prefill", "SIGKILL to a prefill worker at work", partial(_kill, role="prefill")),
    Scenario("kill_decode", "SIGKILL to a decode worker at work", partial(_kill, role="decode")),
    Scenario("freeze_prefill", "SIGSTOP for 4 s", partial(_freeze, role="prefill", seconds=4)),
    Scenario("freeze_decode", "SIGSTOP for 4 s", partial(_freeze, role="decode", seconds=4)),
    Scenario(
        "freeze_past_leases",
        "SIGSTOP to a decode worker for 12 s, longer than its lease and that of KV blocks",
        partial(_freeze, role="decode", seconds=12),
    ),
    Scenario("drop_transfers", "for 2 s the KV link of a prefill worker breaks at a chunk", _DROP),
    Scenario("delay_transfers", "for 2 s chunks come 0.5 s late", partial(_damage, order="delay")),
    Scenario(
        "corrupt_transfers", "for 2 s chunks fail their digest", _CORRUPT, (), needs_vllm=True
    ),
    Scenario("abort_storm", "60 % of the clients leave, at any moment", _abort),
    Scenario("slow_clients", "4 clients pause 0.1 s after each piece", _slow_readers),
    Scenario("expired_lease", "a decode worker stops renewing, then continues", _expired_lease),
    Scenario(
        "kill_all_decode", "SIGKILL to all decode workers", partial(_kill_all, roles="decode")
    ),
    Scenario("kill_all", "SIGKILL to all", partial(_kill_all, roles="prefill,decode")),
    Scenario("kill_router", "SIGKILL to the only router; its streams are lost", _kill_router),
    Scenario("kill_router_of_two", "clients continue at the other", _kill_router_of_two, _TWO),
    Scenario("rolling_restart", "SIGTERM to all, one after the other", _rolling_restart, _TWO),
    Scenario("drop_transfers_tcp", "as drop_transfers, KV over TCP", _DROP, _TCP, needs_vllm=True),
    Scenario("corrupt_transfers_tcp", "KV over TCP", _CORRUPT, _TCP, needs_vllm=True),
)
SCENARIOS: Final = {scenario.name: scenario for scenario in _ALL}
