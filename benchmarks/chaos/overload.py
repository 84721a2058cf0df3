"""Far more requests than can be served, for a minute: what is refused is told so, memory stays, and
afterwards service is as before."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks.chaos.flood import TIMEOUT_S, Flood, Met
from benchmarks.chaos.result import host
from benchmarks.chaos.row import EMPTY_S
from benchmarks.chaos.service import Service
from benchmarks.prompts import ordinary_tokens
from pdserve.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.chaos.settings import ChaosSettings

SCHEMA: Final = "pdserve.chaos.overload/1"
PROMPTS, PROMPT_TOKENS = 16, 64
AT_ONCE: Final = 48  # clients that find the capacity, each asking again when it is answered
SETTLE_S: Final = 20.0  # for which service is watched afterwards
CALM: Final = 0.5  # of the capacity, before and after
# A first token that took so many times the calm median is not normal service.
NORMAL_TIMES, NORMAL_S = 3.0, 0.1
MOSTLY: Final = 0.95
_MIB: Final = 1 << 20
_SHOWN: Final = 20


@dataclass(slots=True)
class OverloadResult:
    """Rates a second. ``refused_untold`` were refused without a time to try again. ``normal_s``
    is when, after the last request of the overload, requests were served as before it; None where
    they never were. ``memory_mib`` by process: before, the most,
    and at the end."""

    created: str
    engine: str
    workers: str
    model: str
    host: dict[str, object]
    times: float
    seconds: float
    capacity_per_s: float = 0.0
    offered_per_s: float = 0.0
    served_per_s: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)
    refused_untold: int = 0
    wrong_answers: int = 0
    calm_ttft_s: float = 0.0
    overload_ttft_s: float = 0.0
    normal_s: float | None = None
    leaked_blocks: int = 0
    memory_mib: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing failed, nothing wrong, nothing left, and normal again."""
        bad = self.fates["failed"] or self.refused_untold or self.wrong_answers
        return not (bad or self.leaked_blocks or self.left) and self.normal_s is not None

    def to_json(self) -> dict[str, Any]:
        """The whole of it."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"schema": SCHEMA, **plain, "passed": self.passed}


async def run_overload(
    settings: ChaosSettings,
    seconds: float,
    times: float,
    directory: Path,
    *,
    doing: Callable[[str, str], None],
) -> OverloadResult:
    """Raises :class:`BenchError` where the service did not start."""
    settings = settings.with_default("router.slo.refuse_beyond", 1.0)
    service = Service(settings.config(), directory / "service")
    result = OverloadResult(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        engine=settings.engine,
        workers=settings.workers,
        model="",
        host=host(),
        times=times,
        seconds=seconds,
    )
    try:
        doing("start", f"router and {settings.workers} workers")
        await service.start()
        result.model = service.model
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(service.grpc))
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                )
            )
            flood = Flood(client, session, service.http, service.model)
            await Overload(settings.seed, service, flood, result, doing).run()
        left = await service.until_empty(EMPTY_S)
        result.leaked_blocks, result.left = left.blocks, list(left.what)
    finally:
        doing("stop", "letting all processes end")
        result.left += (await service.stop()).what
    return result


class Overload:
    """State: what was answered for each prompt, the tally in ``result``."""

    def __init__(
        self,
        seed: int,
        service: Service,
        flood: Flood,
        result: OverloadResult,
        doing: Callable[[str, str], None],
    ) -> None:
        self._service, self._flood, self._result, self._doing = service, flood, result, doing
        self._rng = random.Random(seed)
        tokens = ordinary_tokens(service.vocab_size)
        self._prompts = [
            [self._rng.randrange(tokens.low, tokens.high) for _ in range(PROMPT_TOKENS)]
            for _ in range(PROMPTS)
        ]
        self._expected: dict[int, str] = {}
        self._rss: dict[str, list[float]] = {}

    async def run(self) -> None:
        """Find the capacity, look at calm service, exceed it, and look again."""
        result = self._result
        self._doing("start", "finding the capacity")
        result.capacity_per_s = round(await self._capacity(min(10.0, result.seconds)), 1)
        calm = CALM * result.capacity_per_s
        self._doing("calm", f"{calm:.0f} requests a second")
        before = self._tally(await self._send(calm, min(10.0, result.seconds)))
        result.calm_ttft_s = _median_ttft_s(before)
        weighing = asyncio.create_task(self._weigh())
        sides: list[asyncio.Task[Any]] = [weighing]
        try:
            offered = result.times * result.capacity_per_s
            self._doing("overload", f"{offered:.0f} requests a second for {result.seconds:.0f} s")
            sending = asyncio.create_task(self._send(offered, result.seconds))
            sides.append(sending)
            await asyncio.sleep(result.seconds)
            ended_s = time.monotonic()
            self._doing("after", f"{calm:.0f} requests a second again")
            after = self._tally(await self._send(calm, SETTLE_S))
            during = self._tally(await sending)
        finally:
            for task in sides:
                task.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
        result.offered_per_s = round(len(during) / result.seconds, 1)
        served = [met for met in during if met.fate == "served"]
        result.served_per_s = round(len(served) / result.seconds, 1)
        result.overload_ttft_s = _median_ttft_s(served)
        result.normal_s = normal_after_s(after, ended_s, result.calm_ttft_s)
        result.memory_mib = {
            name: (round(sizes[0], 1), round(max(sizes), 1), round(sizes[-1], 1))
            for name, sizes in self._rss.items()
        }

    async def _capacity(self, seconds: float) -> float:
        """Requests a second that are answered when there is always another one."""
        ends_at = time.monotonic() + seconds
        answered = 0

        async def client() -> None:
            nonlocal answered
            while time.monotonic() < ends_at:
                met = await self._one()
                if met.fate == "served":
                    answered += 1
                else:
                    await asyncio.sleep(min(met.retry_after_s, 0.2))

        began_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        return answered / (time.monotonic() - began_s)

    async def _send(self, rate_per_s: float, seconds: float) -> list[Met]:
        """At random moments, whatever comes back; returns when all have ended."""
        tasks: list[asyncio.Task[Met]] = []
        at_s = time.monotonic()
        ends_at = at_s + seconds
        try:
            while (at_s := at_s + self._rng.expovariate(rate_per_s)) < ends_at:
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                # What could not be sent in time is not sent: the rate told is what was.
                if time.monotonic() > ends_at:
                    break
                tasks.append(asyncio.create_task(self._one()))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self) -> Met:
        number = self._rng.randrange(PROMPTS)
        send = self._flood.over_grpc if self._rng.random() < 0.25 else self._flood.over_http
        met = await send(self._prompts[number])
        if met.fate == "served" and self._expected.setdefault(number, met.text) != met.text:
            self._result.wrong_answers += 1
        return met

    def _tally(self, mets: Sequence[Met]) -> Sequence[Met]:
        result = self._result
        for met in mets:
            result.fates[met.fate] += 1
            result.refused_untold += met.fate == "refused" and not met.retry_after_s > 0
            if met.error and len(result.errors) < _SHOWN:
                result.errors.append(met.error)
        return mets

    async def _weigh(self) -> None:
        pids = {"router": await self._service.pid("router"), "up": self._service.up_pid}
        pids |= {name: await self._service.pid(name) for name in self._service.names}
        while True:
            rss = self._service.rss_bytes()
            for name, pid in pids.items():
                self._rss.setdefault(name, []).append(rss.get(pid, 0) / _MIB)
            await asyncio.sleep(1.0)


def _median_ttft_s(mets: Sequence[Met]) -> float:
    served = [met.ttft_s for met in mets if met.fate == "served"]
    return round(statistics.median(served), 4) if served else 0.0


def normal_after_s(mets: Sequence[Met], ended_s: float, calm_ttft_s: float) -> float | None:
    """Seconds after ``ended_s`` from which on at least :data:`MOSTLY` of ``mets``, in the order in
    which they were sent, were served as in calm; None where that is not so of their last quarter.
    """
    limit_s = NORMAL_TIMES * calm_ttft_s + NORMAL_S
    since, normal = None, 0
    for count, met in enumerate(reversed(mets), start=1):
        normal += met.fate == "served" and met.ttft_s <= limit_s
        if normal >= MOSTLY * count and count * 4 >= len(mets):
            since = met.sent_s
    return None if since is None else round(max(0.0, since - ended_s), 2)
