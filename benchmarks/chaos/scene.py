"""What a fault has at hand while its row's requests run."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from benchmarks.chaos.orders import Order
from benchmarks.chaos.refusals import is_clean
from benchmarks.chaos.service import LOOK_S
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from benchmarks.chaos.answers import Outcome
    from benchmarks.chaos.load import Load
    from benchmarks.chaos.service import Service


class MissedError(BenchError):
    """The fault found nothing to hit: the row shows nothing, and is repeated."""


class Fault(Protocol):
    """One row of the matrix."""

    @property
    def name(self) -> str:
        """As the options have it."""
        ...

    @property
    def what(self) -> str:
        """For a reader of the table."""
        ...

    @property
    def needs_vllm(self) -> bool:
        """Whether it hits nothing else."""
        ...

    async def run(self, scene: Scene) -> None:
        """Do it while requests run, and undo what has to be undone."""
        ...


@dataclass(slots=True)
class Scene:
    """State: what was done (``notes``), when it began (``struck_s``), and which requests may fail
    or break off for it: they are counted apart. Those that were sent before ``workers_s`` may end
    with a clean error: there was no worker for them."""

    service: Service
    load: Load
    rng: random.Random
    struck_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    excused: set[int] = field(default_factory=set)
    workers_s: float = 0.0

    def struck(self) -> None:
        """The fault begins."""
        self.struck_s = self.struck_s or time.monotonic()

    def excuses(self, outcome: Outcome, *, within_s: float) -> bool:
        """Whether a request may have failed."""
        lacked = outcome.sent_s < self.workers_s and outcome.ended_s >= self.struck_s
        return outcome.number in self.excused or (lacked and is_clean(outcome, within_s))

    def note(self, text: str) -> None:
        """What a reader of the row should know."""
        self.notes.append(text)

    async def until_open(self, count: int, *, pieces: int = 1) -> None:
        """So many answers are on their way, each with so many pieces. Raises MissedError."""
        await self.until(
            lambda: sum(x.pieces >= pieces for x in self.load.open()) >= count,
            f"{count} answers on their way",
        )

    async def until(self, what: Callable[[], object], text: str) -> None:
        """Wait for it while there are requests. Raises MissedError."""
        while not what():
            if self.load.is_over:
                raise MissedError(f"never were {text}")
            await asyncio.sleep(LOOK_S)

    async def catch(self, role: str) -> tuple[str, int]:
        """Stop (SIGSTOP) a worker of a role that has work of this row in hand, and be sure of it: a
        prefill that is not over, or answers that are. Its name and pid. Raises MissedError."""
        while True:
            for name in await self.service.ready(role):
                if not await self._works(name, role):
                    continue
                pid = await self.service.pid(name)
                self.service.stop_pid(pid)
                # What it had sent before is with the router by now.
                await asyncio.sleep(5 * LOOK_S)
                count = await self._works(name, role)
                if count:
                    self.struck()
                    self.note(f"{name} with {count} in hand")
                    return name, pid
                self.service.go_on_pid(pid)
            if self.load.is_over:
                raise MissedError(f"never was a {role} worker at work")
            await asyncio.sleep(LOOK_S / 4)

    async def _works(self, name: str, role: str) -> int:
        entry = await self.service.entry(name)
        if entry is None:
            return 0
        if role == "prefill" and not entry.outstanding_tokens:
            return 0
        return entry.outstanding_requests

    async def ordered(self, order: Order, *names: str, seconds: float) -> None:
        """Have processes do wrong for so long, and until they did it once. Raises MissedError."""
        before = self.service.hits(*names)
        self.struck()
        for name in names:
            self.service.order(name, order)
        try:
            await asyncio.sleep(seconds)
            await self.until(lambda: self.service.hits(*names) > before, "they at it")
        finally:
            for name in names:
                self.service.order(name, Order())
        self.note(f"{self.service.hits(*names) - before} times on {' and '.join(names)}")
