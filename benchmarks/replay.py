"""Replay a trace against one endpoint.

Each request is sent when it is due, even if earlier answers are late (open loop). A closed loop
would hide stalls, because requests that are due during a stall are not sent (coordinated omission).
The turns of a session are the exception: an agent sends the next turn after the answer, which its
prompt contains, and a tool call.
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
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import psutil

from benchmarks.client import exactly
from benchmarks.errors import BenchError, TargetError, WarmupFailed
from benchmarks.metrics import RequestTimeline, Summary, summarise
from benchmarks.traces import load_trace
from benchmarks.workload import PromptMaker, Shape, due_times_s, shape_workload, speedup_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.client import Request, ServedModel, Target
    from benchmarks.progress import Progress
    from benchmarks.traces import Trace, TraceRequest
    from benchmarks.workload import Workload

SCHEMA: Final = "pdserve.bench.replay/2"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings of a replay.

    `rate_per_s`: if given, `speedup` is set to reach this mean rate, by the times in the trace. The
    pauses of sessions are divided by `speedup`, too. `model` and `vocab_size` are
    required if the endpoint does not report them. `warmup`: requests that are sent one at a time
    before the clock starts.
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
    """The result of one replay. All figures are computed from `records`, which exclude the
    warm-up."""

    created: str
    trace: Mapping[str, Any]
    workload: Mapping[str, Any]
    target: Mapping[str, Any]
    settings: Mapping[str, Any]
    slo_s: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, Any]
    records: tuple[RequestTimeline, ...]

    def summary(self) -> Summary:
        return summarise(self.records, self.slo_s)

    def to_json(self, *, with_records: bool = True) -> dict[str, Any]:
        """Return the settings, the summary and, with `with_records`, the timelines."""
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
    """Replay a trace. `trace`: the trace named in the settings, if it is already loaded. `clock`
    returns seconds from an arbitrary start.

    Raises BenchError for settings that do not fit the trace or the endpoint, and WarmupFailed.
    Failures after the warm-up are in the result.
    """
    trace = trace or load_trace(settings.trace)
    model = await target.model(settings.model)
    vocab_size = _vocab_size(settings, model, target.address)
    workload = _workload_of(trace, settings, model)
    arrivals_s = [row.arrival_s for _, row in workload.rows]
    due_s = due_times_s(arrivals_s, tick_s=trace.meta.tick_s, seed=settings.seed)
    if settings.rate_per_s is not None:
        settings = replace(settings, speedup=speedup_for(due_s, settings.rate_per_s))
    ignored = f"; ignored fields: {', '.join(trace.ignored)}" if trace.ignored else ""
    progress.say(f"trace {trace.meta.name} ({trace.meta.format} format{ignored})", once=True)
    progress.say(str(workload.cut), once=True)
    maker = PromptMaker(trace.digest(), settings.seed, vocab_size, workload.cut.block_size)

    requests = _Requests(target, model, maker, settings)
    measured = [
        requests.turn(str(index), index, row, at_s / settings.speedup)
        for (index, row), at_s in zip(workload.rows, due_s, strict=True)
    ]
    sessions = _sessions_of(measured)
    # Later turns are built during their session, because they contain earlier answers.
    for turns in sessions:
        requests.make(turns[0])
    await _warm_up(requests, workload.rows[: settings.warmup], clock)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    progress.requests(len(measured))
    # Exempt the encoded requests, which live as long as the run, from garbage collection, so that
    # its pauses are short.
    gc.collect()
    gc.freeze()
    try:
        await _Sender(requests, _from_now(clock), progress).send_all(sessions)
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
        records=tuple(turn.record for turn in measured),
    )


def _vocab_size(settings: ReplaySettings, model: ServedModel, address: str) -> int:
    size = settings.vocab_size or model.vocab_size
    if size is None:
        raise BenchError(
            f"{address} does not report the vocabulary size of {model.name}; give it with "
            "--vocab-size (vocab_size in the model's config.json)"
        )
    return size


def _workload_of(trace: Trace, settings: ReplaySettings, model: ServedModel) -> Workload:
    limits = [settings.shape.max_total_tokens, model.max_model_len]
    most = min((x for x in limits if x is not None), default=None)
    return shape_workload(trace, replace(settings.shape, max_total_tokens=most))


def _sessions_of(turns: Iterable[_ReplayTurn]) -> list[list[_ReplayTurn]]:
    """Group turns by session and number them. A request without a session is alone in its group."""
    sessions: dict[object, list[_ReplayTurn]] = {}
    for turn in turns:
        own = sessions.setdefault(turn.row.session or turn.record.index, [])
        own.append(turn)
        turn.record.turn = len(own)
    return list(sessions.values())


async def _warm_up(
    requests: _Requests, rows: Iterable[tuple[int, TraceRequest]], clock: Callable[[], float]
) -> None:
    """Send these requests one after the other. Raises WarmupFailed."""
    for number, (index, row) in enumerate(rows, start=1):
        # Without block ids and session, a warm-up prompt shares no prefix with other requests.
        alone = replace(row, hash_ids=None, session="", kept_tokens=0)
        turn = requests.turn(f"warmup-{index}", index, alone, 0.0)
        requests.make(turn)
        with suppress(TimeoutError):
            async with asyncio.timeout(requests.settings.drain_timeout_s):
                await _follow(requests.target, turn, _from_now(clock))
        if turn.record.status != "ok":
            raise WarmupFailed(f"warm-up request {number} failed: {turn.record.error}")


def _from_now(clock: Callable[[], float]) -> Callable[[], float]:
    start_s = clock()
    return lambda: clock() - start_s


@dataclass(slots=True)
class _ReplayTurn:
    """A request to send, alone or as a turn of a session. `prompt` is kept for the next turn."""

    name: str
    record: RequestTimeline
    row: TraceRequest
    prompt: Sequence[int] = ()
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class _Requests:
    """Builds the requests of a replay."""

    target: Target
    model: ServedModel
    maker: PromptMaker
    settings: ReplaySettings

    def turn(self, name: str, index: int, row: TraceRequest, at_s: float) -> _ReplayTurn:
        prefix = f"bench-{self.settings.seed}-"
        record = RequestTimeline(
            index=index,
            request_id=prefix + name,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            scheduled_s=round(at_s, 6),
            session=row.session and prefix + row.session,
        )
        return _ReplayTurn(name, record, row)

    def make(self, turn: _ReplayTurn, history: Sequence[int] = ()) -> None:
        """Add the prompt and the request. `history`: prompt and answer of the previous turn."""
        record, row = turn.record, turn.row
        prompt = self.maker.tokens(turn.name, row, history)
        record.kept_tokens = min(row.kept_tokens, len(history))
        sampling = exactly(row.output_tokens)
        turn.request = self.target.prepare(
            self.model, record.request_id, prompt, sampling, record.session
        )
        if row.session:
            turn.prompt = prompt


async def _follow(target: Target, turn: _ReplayTurn, now: Callable[[], float]) -> list[int]:
    """Send one request and record its answer or failure. Return the token ids that the endpoint
    reported."""
    record, answer = turn.record, list[int]()
    assert turn.request is not None
    record.sent_s = round(now(), 6)
    try:
        async for piece in target.stream(turn.request):
            record.add(piece, now())
            answer += piece.token_ids
        record.complete(now())
    except TargetError as error:
        record.fail(str(error), now())
    turn.request = None
    return answer


class _Sender:
    """Sends the requests of a replay. State: latest due time so far."""

    def __init__(self, requests: _Requests, now: Callable[[], float], progress: Progress) -> None:
        self._requests = requests
        self._now = now
        self._progress = progress
        self._last_due_s = 0.0

    async def send_all(self, sessions: Sequence[Sequence[_ReplayTurn]]) -> None:
        """Send all sessions, in the order of their first turns, and wait for the answers.

        Cancel requests that have not ended `drain_timeout_s` after the last one was due.
        """
        drain_s = self._requests.settings.drain_timeout_s
        async with asyncio.TaskGroup() as group:
            tasks = set()
            for turns in sessions:
                await asyncio.sleep(0)
                await self._wait(turns[0].record)
                tasks.add(group.create_task(self._send(turns)))
            while tasks and (left_s := self._last_due_s + drain_s - self._now()) > 0:
                # With sessions, more requests become due in the meantime.
                _, tasks = await asyncio.wait(tasks, timeout=left_s)
            for task in tasks:
                task.cancel()

    async def _send(self, turns: Sequence[_ReplayTurn]) -> None:
        before: RequestTimeline | None = None
        history: list[int] = []
        for turn in turns:
            record = turn.record
            if before is not None:
                pause_s = turn.row.pause_s / self._requests.settings.speedup
                record.scheduled_s = round((before.end_s or 0.0) + pause_s, 6)
                self._requests.make(turn, history)
                await self._wait(record)
            answer = await _follow(self._requests.target, turn, self._now)
            self._progress.ended(is_ok=record.status == "ok")
            if record.status != "ok":
                for later in turns[record.turn :]:
                    later.record.fail(f"turn {record.turn} of the session failed", self._now())
                    self._progress.ended(is_ok=False)
                return
            history = [*turn.prompt, *answer]
            turn.prompt, before = (), record

    async def _wait(self, record: RequestTimeline) -> None:
        """Return when the request is due."""
        self._last_due_s = max(self._last_due_s, record.scheduled_s)
        while (left_s := record.scheduled_s - self._now()) > 0:  # noqa: ASYNC110 - time is the event
            await asyncio.sleep(left_s)  # again if the timer fires early


# -- results as files


def jsonable(value: object) -> Any:
    """Convert a value to JSON types: dataclasses become objects, infinities null."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def parse(whole: object, kind: type[T]) -> T:
    """Convert the result of `jsonable` back to `kind`. Raises BenchError."""
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        raise BenchError(f"part of the result is missing or wrong: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Raises BenchError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror or error}") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises BenchError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None


def host_facts() -> dict[str, Any]:
    """Return the facts about this machine that affect speed, but nothing that identifies it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor() or "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
