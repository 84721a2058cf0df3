"""Run a service under traffic and worker churn, and measure all its processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import psutil
import yaml

from benchmarks.chaos.matrix import ChaosSettings
from benchmarks.errors import BenchError
from benchmarks.report.tables import print_line, print_table
from benchmarks.service import LocalService, LoggedProcess, with_children
from benchmarks.soak.slopes import MIB, growth
from benchmarks.soak.traffic import Traffic
from pdserve.deploy.local.groups import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.progress import Progress
    from benchmarks.soak.slopes import Growth

WARM_UP: Final = 0.25  # share of the duration
MOST_FAILED: Final = 0.001  # share of all requests
# One worker of `up` is killed each time that this many guests have joined. It is restarted under
# its name, after a pause that grows with its deaths.
_RESTART_EVERY: Final = 16
_TASKS: Final = "pdserve_asyncio_tasks "
_SCRAPE = aiohttp.ClientTimeout(total=10.0)
_TOTAL: Final = "all processes"

Key = tuple[str, int, str]
"""Name of a process, its pid, and a measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """Settings of a soak test. `clients` together send `rate_per_s` requests per second. Every
    `churn_s` a worker with a new name joins, and the previous one leaves. `changes`: dotted
    configuration keys."""

    duration_s: float
    engine: str = "fake"
    prefill: int = 2
    decode: int = 2
    rate_per_s: float = 24.0
    clients: int = 8
    churn_s: float = 20.0
    sample_s: float = 5.0
    seed: int = 1
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Result of a soak test. `requests`: counts of outcomes by kind of request. `slopes`: growth of
    the processes that ran for the whole measured time. `passed` is False if a measure leaks or too
    many requests failed."""

    duration_s: float
    requests: Mapping[str, Mapping[str, int]]
    errors: Sequence[str]
    workers_joined: int
    workers_killed: int
    slopes: Sequence[Growth]

    @property
    def passed(self) -> bool:
        ends = self.requests.values()
        failed = sum(x.get("failed", 0) for x in ends)
        asked = sum(sum(x.values()) for x in ends)
        return not any(x.leaks for x in self.slopes) and failed <= MOST_FAILED * asked

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


@dataclass(slots=True)
class Samples:
    """The measures of every process of a service over time."""

    times_s: list[float] = field(default_factory=list)
    values: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, at_s: float, found: Mapping[Key, float]) -> None:
        """Add a sample. Drop processes that have ended and ignore new ones, because only a process
        that runs for the whole time can be judged."""
        is_first = not self.times_s
        self.times_s.append(at_s)
        for key in [x for x in self.values if x not in found]:
            del self.values[key]
        for key, value in found.items():
            if is_first or key in self.values:
                self.values[key].append(value)

    def slopes(self) -> list[Growth]:
        judged = (
            growth(name if name == _TOTAL else f"{name} ({pid})", what, self.times_s, values)
            for (name, pid, what), values in self.values.items()
        )
        return [x for x in judged if x is not None]


class Guests:
    """Workers with new names that join the service and leave it, killed and drained in turn."""

    def __init__(self, config: Mapping[str, Any], service: LocalService, environment: Any) -> None:
        self.joined = self.killed = 0
        self._config = config["worker"]
        self._service = service
        self._environment = environment
        self._present: LoggedProcess | None = None

    async def run(self, every_s: float) -> None:
        for number in itertools.count():
            guest = await self._join(number)
            leaving, self._present = self._present, guest
            if leaving is not None:
                await self._leave(leaving, kill=number % 2 == 0)
            if number % _RESTART_EVERY == _RESTART_EVERY - 1:
                self._kill_last_worker()
            await asyncio.sleep(every_s)

    async def aclose(self) -> None:
        if self._present is not None:
            await self._present.stop()

    async def _join(self, number: int) -> LoggedProcess:
        name, port, directory = f"guest-{number}", free_ports("127.0.0.1"), self._service.directory
        routers = [x["grpc"] for x in self._service.ready["routers"]]
        role = ("prefill", "decode")[number % 2]
        own = {"worker_id": name, "role": role, "routers": routers, "debug": {"port": port}}
        path = directory / "guest.yaml"
        path.write_text(yaml.safe_dump({"worker": {**self._config, **own}}), encoding="utf-8")

        async def is_ready() -> bool:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"http://127.0.0.1:{port}/ready") as response:
                    return response.status == 200
            return False

        guest = LoggedProcess(name, directory / "guest.log")
        command = [sys.executable, "-m", "pdserve", "worker", "--config", str(path)]
        async with aiohttp.ClientSession(timeout=_SCRAPE) as session:
            try:
                await guest.start(command, is_ready, self._environment)
            except BaseException:
                await guest.stop(signal.SIGKILL)
                raise
        self.joined += 1
        return guest

    async def _leave(self, guest: LoggedProcess, *, kill: bool) -> None:
        self.killed += kill
        await guest.stop(signal.SIGKILL if kill else signal.SIGTERM)

    def _kill_last_worker(self) -> None:
        self.killed += 1
        with suppress(ProcessLookupError):
            os.kill(self._service.read_ready()["workers"][-1]["pid"], signal.SIGKILL)


async def run_soak(settings: SoakSettings, directory: Path, progress: Progress) -> SoakResult:
    """Run the soak test. Raises BenchError if the service does not start, or ends."""
    config, environment = _prepared(settings, directory)
    service = LocalService("the service", config, directory, environment=environment)
    async with AsyncExitStack() as ending:
        progress.step("starting the service")
        ending.push_async_callback(service.stop)
        await service.start()
        traffic = await ending.enter_async_context(aclosing(Traffic(service.ready, settings.seed)))
        guests = Guests(config, service, environment)
        await ending.enter_async_context(aclosing(guests))
        work = [
            asyncio.create_task(traffic.run(settings.rate_per_s, settings.clients)),
            asyncio.create_task(guests.run(settings.churn_s)),
        ]
        try:
            samples = await _measured(settings, service, traffic, work, progress)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
    ends: dict[str, dict[str, int]] = defaultdict(dict)
    for (kind, end), count in sorted(traffic.counts.items()):
        ends[kind][end] = count
    return SoakResult(
        settings.duration_s,
        dict(ends),
        traffic.errors,
        guests.joined,
        guests.killed,
        samples.slopes(),
    )


def _prepared(settings: SoakSettings, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the service's configuration and its processes' environment variables. The worker token
    is configured, because guests need it. TMPDIR is set, so that temporary files count as disk."""
    temporary, token = directory / "tmp", directory / "worker_token"
    temporary.mkdir(parents=True, exist_ok=True)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    own = [(f"{x}.access.worker_token_file", str(token)) for x in ("router", "worker")]
    chaos = ChaosSettings(
        engine=settings.engine,
        prefill=settings.prefill,
        decode=settings.decode,
        changes=settings.changes,
    )
    return chaos.config(own), {"TMPDIR": str(temporary)}


async def _measured(
    settings: SoakSettings,
    service: LocalService,
    traffic: Traffic,
    work: Sequence[asyncio.Task[None]],
    progress: Progress,
) -> Samples:
    """Sample until the duration is over. Return the samples after the warm-up."""
    samples, started_s = Samples(), time.monotonic()
    async with aiohttp.ClientSession(timeout=_SCRAPE) as session:
        while (past_s := time.monotonic() - started_s) < settings.duration_s:
            for task in work:
                if task.done():
                    task.result()
            if not service.is_alive:
                raise BenchError("the service ended; see up.log")
            found = await _sample(service, session)
            if past_s >= WARM_UP * settings.duration_s:
                samples.add(past_s, found)
            counts = traffic.counts
            failed = sum(n for (_, end), n in counts.items() if end == "failed")
            memory = found[_TOTAL, 0, "memory"] / MIB
            text = f"soak: {past_s:,.0f} of {settings.duration_s:,.0f} s, {counts.total():,}"
            progress.step(f"{text} requests, {failed} failed, {memory:,.0f} MiB")
            await asyncio.sleep(settings.sample_s)
    return samples


async def _sample(service: LocalService, session: aiohttp.ClientSession) -> dict[Key, float]:
    """Return the measures of all processes of a service, and the size of its directory without
    logs."""
    ready = service.read_ready()
    entries = {x["pid"]: x.get("worker_id", "router") for x in ready["workers"] + ready["routers"]}
    urls = {x["pid"]: x.get("debug", x.get("http")) for x in ready["workers"] + ready["routers"]}
    found: dict[Key, float] = {}
    processes = with_children([ready["pid"]])
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            name = entries.get(process.pid) or _program(process)
            found[name, process.pid, "memory"] = process.memory_info().rss
            found[name, process.pid, "descriptors"] = process.num_fds()
            found[name, process.pid, "threads"] = process.num_threads()
    found[_TOTAL, 0, "memory"] = sum(x for (_, _, what), x in found.items() if what == "memory")
    found[_TOTAL, 0, "processes"] = len(processes)
    found[_TOTAL, 0, "disk"] = sum(await asyncio.to_thread(list, _sizes(service.directory)))
    for pid, name in entries.items():
        url = urls[pid] if "://" in urls[pid] else f"http://{urls[pid]}"
        with suppress(aiohttp.ClientError, TimeoutError):  # the process may be restarting
            async with session.get(f"{url}/metrics") as response:
                lines = (await response.text()).splitlines()
            found[name, pid, "series"] = sum(not line.startswith("#") for line in lines)
            tasks = (line for line in lines if line.startswith(_TASKS))
            found[name, pid, "tasks"] = float(next(tasks).removeprefix(_TASKS))
    return found


def _program(process: psutil.Process) -> str:
    """Return the module that a Python process runs, or the program of another process."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()


def _sizes(directory: Path) -> Iterator[int]:
    for path in directory.rglob("*"):
        with suppress(OSError):
            if path.is_file() and ".log" not in path.name:
                yield path.stat().st_size


def print_result(result: SoakResult) -> None:
    """Print all slopes, leaks first, then by slope relative to the median."""
    ordered = sorted(result.slopes, key=lambda x: (-x.leaks, -x.slope / max(x.median, 1.0)))
    rows = []
    for each in ordered:
        unit = MIB if each.measure in ("memory", "disk") else 1
        name = f"{each.measure}, MiB" if unit == MIB else each.measure
        numbers = (x / unit for x in (each.median, each.slope, each.slope_low, each.limit))
        rows.append([each.process, name, *numbers, "LEAKS" if each.leaks else "ok"])
    print_table(["process", "measure", "median", "an hour", "at least", "limit", ""], rows)
    for kind, ends in result.requests.items():
        print_line(f"{kind}: {', '.join(f'{count:,} {end}' for end, count in ends.items())}")
    print_line(f"workers: {result.workers_joined} joined, {result.workers_killed} killed")
    for text in result.errors:
        print_line(text)
