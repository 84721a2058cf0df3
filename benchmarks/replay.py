"""Replay a trace against one endpoint.

Each request is sent when it is due, however late earlier answers are (open loop). A closed loop
would hide every stall, because the requests that fall into it are never sent (coordinated
omission).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import time
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec
import psutil

from benchmarks.client import exactly
from benchmarks.errors import BenchError, TargetError, WarmupFailed
from benchmarks.metrics import RequestRecord, Summary, summarise
from benchmarks.traces import (
    PromptMaker,
    Shape,
    due_times_s,
    load_trace,
    shape_workload,
    speedup_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.client import Request, Target
    from benchmarks.progress import Progress
    from benchmarks.traces import Trace, TraceRequest

SCHEMA: Final = "pdserve.bench.replay/2"
_Planned: TypeAlias = "tuple[RequestRecord, Request]"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What is sent and when.

    `rate_per_s`, if given, sets `speedup` to reach that many requests a second on average. `model`
    and `vocab_size` are needed if the endpoint does not tell them. `warmup` requests are sent one
    by one before the clock starts.
    """

    trace: str
    shape: Shape = field(default_factory=Shape)
    speedup: float = 1.0
    rate_per_s: float | None = None
    seed: int = 0
    warmup: int = 1
    drain_timeout_s: float = 300.0
    slo_s: Mapping[str, float] = field(default_factory=dict)
    model: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One replay. All figures follow from `records`; the warm-up is not in them."""

    created: str
    trace: Mapping[str, Any]
    workload: Mapping[str, Any]
    target: Mapping[str, Any]
    settings: Mapping[str, Any]
    slo_s: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, Any]
    records: tuple[RequestRecord, ...]

    def summary(self) -> Summary:
        return summarise(self.records, self.slo_s)

    def to_json(self, *, with_records: bool = True) -> dict[str, Any]:
        """Return the settings, the summary and, if asked for, the timelines."""
        kept = self if with_records else replace(self, records=())
        return {"schema": SCHEMA, **jsonable(kept), "summary": jsonable(self.summary())}


async def run_replay(
    settings: ReplaySettings,
    target: Target,
    progress: Progress,
    *,
    trace: Trace | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Replay a trace. `trace` is the one named in the settings if it is already loaded. `clock`
    counts seconds from anywhere.

    Raises BenchError for settings that do not fit the trace or the endpoint, and WarmupFailed.
    Failures after the warm-up are in the result.
    """
    trace = trace or load_trace(settings.trace)
    model = await target.model(settings.model)
    vocab_size = settings.vocab_size or model.vocab_size
    if vocab_size is None:
        raise BenchError(
            f"{target.address} does not tell the vocabulary size of {model.name}; give it with "
            "--vocab-size (vocab_size in the model's config.json)"
        )
    limits = [settings.shape.max_total_tokens, model.max_model_len]
    most = min((x for x in limits if x is not None), default=None)
    workload = shape_workload(trace, replace(settings.shape, max_total_tokens=most))
    arrivals_s = [row.arrival_s for _, row in workload.rows]
    due_s = due_times_s(arrivals_s, tick_s=trace.meta.tick_s, seed=settings.seed)
    if settings.rate_per_s is not None:
        settings = replace(settings, speedup=speedup_for(due_s, settings.rate_per_s))
    ignored = f"; ignored fields: {', '.join(trace.ignored)}" if trace.ignored else ""
    progress.say(f"trace {trace.meta.name} ({trace.meta.format} format{ignored})", once=True)
    progress.say(str(workload.cut), once=True)
    maker = PromptMaker(trace.digest(), settings.seed, vocab_size, workload.cut.block_size)

    def planned(name: str, index: int, row: TraceRequest, at_s: float) -> _Planned:
        record = RequestRecord(
            index=index,
            request_id=f"bench-{settings.seed}-{name}",
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            scheduled_s=round(at_s, 6),
        )
        prompt, sampling = maker.tokens(name, row), exactly(row.output_tokens)
        return record, target.prepare(model, record.request_id, prompt, sampling)

    measured = [
        planned(str(index), index, row, at_s / settings.speedup)
        for (index, row), at_s in zip(workload.rows, due_s, strict=True)
    ]
    for number, (index, row) in enumerate(workload.rows[: settings.warmup], start=1):
        # It shares no prefix with the others.
        record, request = planned(f"warmup-{index}", index, replace(row, hash_ids=None), 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s):
                await _follow(target, request, record, _from_now(clock))
        if record.status != "ok":
            raise WarmupFailed(f"warm-up request {number} failed: {record.error}")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    progress.requests(len(measured))
    # The bodies live as long as the run: the collector need not look at them meanwhile.
    gc.collect()
    gc.freeze()
    try:
        await _send_all(settings, target, measured, _from_now(clock), progress)
    finally:
        gc.unfreeze()
    values = asdict(settings)
    shape = values.pop("shape") | {"scale_lengths": str(settings.shape.scale_lengths)}
    return ReplayResult(
        created=created,
        trace=trace.facts(),
        workload=asdict(workload.cut),
        target={"kind": target.kind, "address": target.address} | asdict(model),
        slo_s=values.pop("slo_s"),
        settings=values | shape,
        host=host_facts(),
        records=tuple(record for record, _ in measured),
    )


def _from_now(clock: Callable[[], float]) -> Callable[[], float]:
    start_s = clock()
    return lambda: clock() - start_s


async def _follow(
    target: Target, request: Request, record: RequestRecord, now: Callable[[], float]
) -> None:
    """Send one request and record its answer. A failure is recorded too."""
    record.sent_s = round(now(), 6)
    try:
        async for piece in target.stream(request):
            record.add(piece, now())
        record.complete(now())
    except TargetError as error:
        record.fail(str(error), now())


async def _send_all(
    settings: ReplaySettings,
    target: Target,
    plan: Sequence[_Planned],
    now: Callable[[], float],
    progress: Progress,
) -> None:
    """Send all requests and wait for the answers.

    Requests that have not ended `drain_timeout_s` after the last one was due are cancelled.
    """

    async def send(record: RequestRecord, request: Request) -> None:
        await _follow(target, request, record, now)
        progress.ended(is_ok=record.status == "ok")

    async with asyncio.TaskGroup() as group:
        tasks = []
        for record, request in plan:
            await asyncio.sleep(0)
            while (left_s := record.scheduled_s - now()) > 0:  # noqa: ASYNC110 - time is the event
                await asyncio.sleep(left_s)  # again if the timer fires early
            tasks.append(group.create_task(send(record, request)))
        left_s = plan[-1][0].scheduled_s + settings.drain_timeout_s - now()
        await asyncio.wait(tasks, timeout=max(0.0, left_s))
        for task in tasks:
            task.cancel()


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
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor() or "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
