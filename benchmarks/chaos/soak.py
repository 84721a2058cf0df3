"""Minutes of requests with every feature while workers die: all is accounted for at the end."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from benchmarks.chaos.answers import Outcome, wrong_tokens
from benchmarks.chaos.asks import TRACE, kinds_of, make_asks
from benchmarks.chaos.memory import Memory, too_steep, weigh
from benchmarks.chaos.orders import Order
from benchmarks.chaos.pair import Pair
from benchmarks.chaos.reference import answer
from benchmarks.chaos.result import host
from benchmarks.chaos.row import EMPTY_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.chaos.asks import Ask
    from benchmarks.chaos.memory import Growth
    from benchmarks.chaos.settings import ChaosSettings

SCHEMA: Final = "pdserve.chaos.soak/2"
KILL_EVERY_S: Final = 10.0
MAX_OPEN: Final = 32
RIGHT_AT_ONCE: Final = 8
# What clients do, and how often of a hundred.
CLIENTS: Final = {"read": 75, "abort": 15, "read slowly": 10}
# What happens beside kills, as often as a kill.
OTHERS: Final = ("freeze", "drop", "delay", "corrupt")
_ABORT_AFTER_S: Final = (0.0, 0.02, 0.1, 0.4, 1.0)
_FROZEN_S: Final = 3.0
_ORDERED_S: Final = 1.5
_SLOW_S: Final = 0.05
_SHOWN: Final = 20
# What keeps things up to a bound is to be full before memory counts: oneDNN, which compiles kernels
# for each number of tokens that a step has, and the router's decisions.
_KERNELS: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
_FULL_SOON: Final = (("router.decision_log_size", 128),)
_WEIGH_EVERY_S: Final = 5.0
# Never killed, so that their memory can be followed; hurt otherwise like the others.
_LONG_LIVED: Final = ("prefill-0", "decode-0")


@dataclass(slots=True)
class SoakResult:
    """``ended`` by what became of requests; ``done`` by fault; ``memory`` of each life of a process
    that was long enough, ``short_lives`` how many of each name were not; ``grew`` those whose
    private memory grew more than it may in a run of this length."""

    created: str
    engine: str
    workers: str
    model: str
    host: dict[str, object]
    trace: str = TRACE
    seconds: float = 0.0
    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    wrong_tokens: int = 0
    compared: int = 0
    leaked_blocks: int = 0
    longest_pause_s: float = 0.0
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[Growth] = field(default_factory=list)
    short_lives: Counter[str] = field(default_factory=Counter)
    grew: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing lost, nothing wrong, nothing left, and memory that stays."""
        is_whole = sum(self.ended.values()) == self.requests == self.compared
        bad = self.ended["failed"] or self.wrong_tokens or self.leaked_blocks or self.left
        return is_whole and not bad and not self.grew

    def to_json(self) -> dict[str, Any]:
        """The whole of it."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["memory"] = [asdict(growth) for growth in self.memory]
        return {"schema": SCHEMA, **plain, "passed": self.passed}


async def run_soak(
    settings: ChaosSettings,
    seconds: float,
    directory: Path,
    *,
    doing: Callable[[str, str], None],
) -> SoakResult:
    """Raises :class:`BenchError` where the service did not get whole again."""
    os.environ.setdefault(*_KERNELS)  # for all that is started from here
    settings = replace(settings, changes=_FULL_SOON + settings.changes)
    pair = Pair(settings, directory)
    result = SoakResult(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        engine=settings.engine,
        workers=settings.workers,
        model="",
        host=host(),
    )
    try:
        doing("start", f"router, {settings.workers} workers, and one for the right answers")
        await pair.start()
        result.model = pair.service.model
        await Soak(settings, pair, result, doing).run(seconds)
        doing("end", "waiting for all workers")
        await pair.service.until_whole()
        left = await pair.service.until_empty(EMPTY_S)
        result.leaked_blocks = left.blocks
        result.left += left.what
    finally:
        doing("stop", "letting all processes end")
        await pair.stop()
        result.left += pair.left
    return result


class Soak:
    """State: the requests on their way, the tally in ``result``."""

    def __init__(
        self,
        settings: ChaosSettings,
        pair: Pair,
        result: SoakResult,
        doing: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._service = pair.service
        self._asker = pair.asker
        self._right = pair.right
        self._result = result
        self._doing = doing
        self._rng = random.Random(settings.seed)
        self._seats = asyncio.Semaphore(MAX_OPEN)
        self._right_seats = asyncio.Semaphore(RIGHT_AT_ONCE)
        self._open: set[asyncio.Task[None]] = set()
        self._memory = Memory()
        self._broken: BaseException | None = None  # no answer of a service: of ours
        self._began_s = 0.0

    async def run(self, seconds: float) -> None:
        """Ask and hurt for so long, then wait for every answer."""
        self._began_s = time.monotonic()
        ends_at = self._began_s + seconds
        sides = [
            asyncio.create_task(self._hurt(ends_at)),
            asyncio.create_task(self._weigh(ends_at)),
        ]
        try:
            await self._send(ends_at)
            self._doing("end", f"{len(self._open)} answers to come")
            await asyncio.gather(*self._open)
            await asyncio.gather(*sides)
        finally:
            for task in (*sides, *self._open):
                task.cancel()
            await asyncio.gather(*sides, *self._open, return_exceptions=True)
        self._result.seconds = round(time.monotonic() - self._began_s, 1)
        self._result.memory, self._result.short_lives = self._memory.growths(seconds)
        self._result.grew = too_steep(self._result.memory, seconds)

    async def _send(self, ends_at: float) -> None:
        kinds = kinds_of(self._settings.engine)
        number = 0
        while time.monotonic() < ends_at:
            await self._seats.acquire()
            (ask,) = make_asks(
                1,
                seed=self._settings.seed,
                vocab_size=self._service.vocab_size,
                kinds=kinds,
                first=number,
            )
            task = asyncio.create_task(self._one(ask))
            self._open.add(task)
            task.add_done_callback(self._ended)
            number += 1
            if self._broken is not None:
                raise self._broken
            await asyncio.sleep(self._rng.expovariate(self._settings.rate_per_s))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled():
            self._broken = self._broken or task.exception()

    async def _one(self, ask: Ask) -> None:
        result = self._result
        result.requests += 1
        result.kinds[ask.kind] += 1
        (client,) = self._rng.choices([*CLIENTS], [*CLIENTS.values()])
        outcome = Outcome(ask.number, time.monotonic())
        slow_s = _SLOW_S if client == "read slowly" else 0.0
        try:
            asking = asyncio.create_task(self._asker.ask(ask, outcome, slow_s=slow_s))
            if client == "abort":
                await asyncio.wait((asking,), timeout=self._rng.choice(_ABORT_AFTER_S))
                asking.cancel()
            await asyncio.wait((asking,))
            if outcome.ending == "open":
                outcome.end("aborted", time.monotonic())
            async with self._right_seats:
                expected = await answer(self._right, ask)
            self._account(ask, outcome, expected)
        finally:
            asking.cancel()
            self._seats.release()

    def _account(self, ask: Ask, outcome: Outcome, expected: Outcome) -> None:
        result = self._result
        wrong = wrong_tokens(outcome, expected)
        result.ended[outcome.ending] += 1
        result.compared += 1
        result.wrong_tokens += wrong
        result.fallbacks.update(outcome.fallbacks)
        result.longest_pause_s = round(max(result.longest_pause_s, outcome.pause_s), 3)
        if (wrong or outcome.ending == "failed") and len(result.errors) < _SHOWN:
            after_s = time.monotonic() - self._began_s
            said = f"{wrong} wrong tokens; " if wrong else ""
            said += outcome.error or f"fallbacks {outcome.fallbacks}"
            result.errors.append(f"{after_s:.0f} s, request {ask.number} ({ask.kind}): {said}")

    # -- faults

    async def _hurt(self, ends_at: float) -> None:
        wait_s = min(KILL_EVERY_S, (ends_at - self._began_s) / 4)
        while time.monotonic() + wait_s < ends_at:
            await asyncio.sleep(wait_s / 2)
            await self._other()
            await asyncio.sleep(wait_s / 2)
            await self._kill()
            self._tell()

    async def _spare(self) -> list[str]:
        """The workers beside which another of their kind is ready: to these it may happen."""
        found = []
        for role in ("prefill", "decode"):
            ready = await self._service.ready(role)
            found += ready if len(ready) > 1 else []
        return found

    async def _kill(self) -> None:
        names = [name for name in await self._spare() if name not in _LONG_LIVED]
        if not names:
            self._result.done["no kill: no other worker ready"] += 1
            return
        name = self._rng.choice(names)
        self._service.look()
        self._service.kill_pid(await self._service.pid(name))
        self._result.done[f"kill {name}"] += 1

    async def _other(self) -> None:
        what = self._rng.choice(OTHERS)
        names = await self._spare()
        if what != "freeze":
            names = [name for name in names if name.startswith("prefill")]
        if not names:
            self._result.done["nothing: no other worker ready"] += 1
            return
        name = self._rng.choice(names)
        if what == "freeze":
            await self._freeze(name)
        else:
            before = self._service.hits(name)
            self._service.order(name, Order(what, delay_s=0.3))
            await asyncio.sleep(_ORDERED_S)
            self._service.order(name, Order())
            self._result.done[f"{what}, chunks"] += self._service.hits(name) - before
        self._result.done[what] += 1

    async def _freeze(self, name: str) -> None:
        pid = await self._service.pid(name)
        self._service.stop_pid(pid)
        try:
            await asyncio.sleep(_FROZEN_S)
        finally:
            self._service.go_on_pid(pid)

    # -- looking

    async def _weigh(self, ends_at: float) -> None:
        pause_s = min(_WEIGH_EVERY_S, (ends_at - self._began_s) / 60)
        living: dict[int, str] = {}
        dead: set[int] = set()
        while time.monotonic() < ends_at:
            living |= await self._service.pids()
            for pid in living.keys() - dead:
                weight = weigh(pid, alone=living[pid] not in self._service.names)
                if weight is not None:
                    now_s = time.monotonic() - self._began_s
                    self._memory.take(living[pid], pid, now_s, weight)
                    continue
                dead.add(pid)
                if not self._service.was_killed(pid):
                    self._result.left.append(f"{living[pid]} died by itself")
            await asyncio.sleep(pause_s)

    def _tell(self) -> None:
        result = self._result
        ended = ", ".join(f"{count} {what}" for what, count in result.ended.items())
        killed = sum(n for what, n in result.done.items() if what.startswith("kill "))
        now_s = time.monotonic() - self._began_s
        self._doing(
            "soak",
            f"{now_s:.0f} s: {ended}, {result.wrong_tokens} wrong tokens, {killed} kills, "
            f"{len(self._open)} open",
        )
