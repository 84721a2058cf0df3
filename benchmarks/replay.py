"""Replay a trace against one endpoint, open loop.

Each request is sent when it is due, however late earlier answers are. A closed loop would hide
every stall, because the requests that fall into it are never sent (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import time
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import psutil

from benchmarks.errors import BenchError, TargetError, WarmupFailed
from benchmarks.metrics import Summary, summarise
from benchmarks.records import RequestRecord, Timeline
from benchmarks.traces import TickJitter, due_times_s, load_trace, speedup_for
from benchmarks.workload import (
    PromptMaker,
    Shape,
    shape_workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.client import Request, ServedModel, Target
    from benchmarks.progress import Progress
    from benchmarks.traces import Trace

SCHEMA: Final = "pdserve.bench.replay/2"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What is sent and when.

    `rate_per_s`, if given, sets `speedup` to reach that many requests a second on average. `model`
    and `vocab_size` are needed if the endpoint does not tell them. `warmup` requests are sent one
    by one before the clock starts; they share no prefix with the others.
    """

    trace: str
    shape: Shape = field(default_factory=Shape)
    speedup: float = 1.0
    rate_per_s: float | None = None
    tick_jitter: TickJitter = "uniform"
    seed: int = 0
    warmup: int = 1
    drain_timeout_s: float = 300.0
    slo_s: Mapping[str, float] = field(default_factory=dict)
    model: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One replay. All figures follow from `records`; `warmup` is not in them."""

    created: str
    trace: Mapping[str, Any]
    workload: Mapping[str, Any]
    target: Mapping[str, Any]
    settings: Mapping[str, Any]
    slo_s: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, Any]
    records: tuple[RequestRecord, ...]
    warmup: tuple[RequestRecord, ...] = ()

    def summary(self) -> Summary:
        return summarise(self.records, self.slo_s)

    def to_json(self, *, with_records: bool = True) -> dict[str, Any]:
        """Return the settings, the summary and, if asked for, the timelines."""
        records = self if with_records else replace(self, records=(), warmup=())
        return {"schema": SCHEMA, **jsonable(records), "summary": jsonable(self.summary())}


@dataclass(frozen=True, slots=True)
class _Planned:
    timeline: Timeline
    request: Request


async def run_replay(
    settings: ReplaySettings, target: Target, progress: Progress, *, trace: Trace | None = None
) -> ReplayResult:
    """Replay a trace. `trace` is the one named in the settings if it is already loaded.

    Raises BenchError for settings that do not fit the trace or the endpoint, and WarmupFailed.
    Failures after the warm-up are in the result.
    """
    trace = trace or load_trace(settings.trace)
    model = await target.model(settings.model)
    limits = [settings.shape.max_total_tokens, model.max_model_len]
    most = min((x for x in limits if x is not None), default=None)
    workload = shape_workload(trace, replace(settings.shape, max_total_tokens=most))
    timing = {"tick_s": trace.meta.tick_s, "jitter": settings.tick_jitter, "seed": settings.seed}
    due_s = due_times_s(workload.arrivals_s, **timing)  # type: ignore[arg-type]
    if settings.rate_per_s is not None:
        settings = replace(settings, speedup=speedup_for(due_s, settings.rate_per_s))
    due_s = [at_s / settings.speedup for at_s in due_s]
    ignored = f"; ignored fields: {', '.join(trace.ignored)}" if trace.ignored else ""
    progress.say_once(f"trace {trace.meta.name} ({trace.meta.format} format{ignored})")
    for line in workload.cut.notes():
        progress.say_once(line)

    maker = _prompts(settings, trace, target, model, workload.block_size)
    clock = _Clock()

    def planned(name: str, index: int, row: Any, at_s: float) -> _Planned:
        request_id = f"bench-{settings.seed}-{name}"
        timeline = Timeline(index, request_id, row.input_tokens, row.output_tokens, at_s, clock.now)
        prompt = maker.tokens(name, row)
        return _Planned(timeline, target.prepare(model, request_id, prompt, row.output_tokens))

    measured = [
        planned(str(index), index, row, at_s)
        for (index, row), at_s in zip(workload.rows, due_s, strict=True)
    ]
    warm = [
        planned(f"warmup-{index}", index, replace(row, hash_ids=None), 0.0)
        for index, row in workload.rows[: settings.warmup]
    ]
    await _warm_up(target, warm, settings.drain_timeout_s)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    progress.begin(len(measured))
    # The bodies live as long as the run: the collector need not look at them meanwhile.
    gc.collect()
    gc.freeze()
    try:
        await send_all(target, measured, settings.drain_timeout_s, clock, progress)
    finally:
        gc.unfreeze()
    values = asdict(settings)
    shape = values.pop("shape") | {"scale_lengths": str(settings.shape.scale_lengths)}
    slo_s = values.pop("slo_s")
    return ReplayResult(
        created=created,
        trace=asdict(trace.meta)
        | {"digest": trace.digest(), "ignored_fields": list(trace.ignored)},
        workload=asdict(workload.cut) | {"block_size": workload.block_size},
        target={"kind": target.kind, "address": target.address} | asdict(model),
        settings=values | shape,
        slo_s=slo_s,
        host=host_facts(),
        records=tuple(x.timeline.record() for x in measured),
        warmup=tuple(x.timeline.record() for x in warm),
    )


class _Clock:
    """Seconds since `start`."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start_s

    async def sleep_until(self, when_s: float) -> None:
        """Let other tasks run, then sleep. A timer that fires early is slept again."""
        await asyncio.sleep(0)
        while (left_s := when_s - self.now()) > 0:  # noqa: ASYNC110 - time is the event
            await asyncio.sleep(left_s)


async def send_all(
    target: Target,
    plan: Sequence[_Planned],
    drain_timeout_s: float,
    clock: _Clock,
    progress: Progress,
) -> None:
    """Send each request when it is due, and wait for the answers.

    Requests that have not ended `drain_timeout_s` after the last one was due are cancelled.
    """
    clock.start_s = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []
    try:
        for planned in plan:
            await clock.sleep_until(planned.timeline.scheduled_s)
            tasks.append(asyncio.create_task(_send(target, planned, progress)))
            progress.sent()
        left_s = plan[-1].timeline.scheduled_s + drain_timeout_s - clock.now()
        await asyncio.wait(tasks, timeout=max(0.0, left_s))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _send(target: Target, planned: _Planned, progress: Progress) -> None:
    timeline = planned.timeline
    timeline.sent_s = timeline.now()
    try:
        async for piece in target.stream(planned.request):
            timeline.add(piece)
        timeline.complete()
    except TargetError as error:
        timeline.fail(str(error))
    finally:
        progress.ended(timeline.status)


async def _warm_up(target: Target, plan: Sequence[_Planned], timeout_s: float) -> None:
    for number, planned in enumerate(plan, start=1):
        timeline = planned.timeline
        timeline.sent_s = timeline.now()
        try:
            async with asyncio.timeout(timeout_s):
                async for piece in target.stream(planned.request):
                    timeline.add(piece)
            timeline.complete()
        except TargetError as error:
            raise WarmupFailed(f"warm-up request {number} failed: {error}") from None
        except TimeoutError:
            raise WarmupFailed(f"warm-up request {number}: no end in {timeout_s:g} s") from None


def _prompts(
    settings: ReplaySettings,
    trace: Trace,
    target: Target,
    model: ServedModel,
    block_size: int | None,
) -> PromptMaker:
    vocab_size = settings.vocab_size or model.vocab_size
    if vocab_size is None:
        raise BenchError(
            f"{target.address} does not tell the vocabulary size of {model.name}; give it with "
            "--vocab-size (vocab_size in the model's config.json)"
        )
    return PromptMaker(
        trace.digest(), seed=settings.seed, vocab_size=vocab_size, block_size=block_size
    )


# -- results as files


def jsonable(value: object) -> Any:
    """Convert to what JSON holds: dataclasses to objects, infinities to null."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def parse(whole: object, kind: type[T]) -> T:
    """Undo `jsonable`. Raises BenchError."""
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        raise BenchError(f"part of the result is missing or wrong: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader sees the whole file or none. Raises BenchError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror or error}") from None


def read_json(path: Path) -> Any:
    """Raises BenchError if the file cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None


def host_facts() -> dict[str, Any]:
    """Return what matters of this machine, and nothing that names it."""
    cpu = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
