"""A replay from settings to result: shape the trace, build the bodies, warm up, replay."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from benchmarks.errors import BenchError, WarmupFailed
from benchmarks.prompts import PromptMaker, ordinary_tokens
from benchmarks.replay import MonotonicClock, Observer, PlannedRequest, replay, warm_up
from benchmarks.result import ReplayResult, host_facts
from benchmarks.schedule import due_times_s, speedup_for
from benchmarks.trace import load_trace
from benchmarks.workload import Shape, shape_workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.replay import Clock
    from benchmarks.schedule import TickJitter
    from benchmarks.targets import PreparedT, ServedModel, Target
    from benchmarks.trace import Trace, TraceRequest
    from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Everything that decides what is sent and when.

    ``rate_per_s``, if given, decides the speed-up: that many requests a second on average.
    ``model`` and ``vocab_size`` are needed only where the endpoint does not tell them. ``warmup``
    requests go out one by one before the clock starts; they are as long as the trace's first ones
    and share no prefix with any.
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


async def run_replay(
    settings: ReplaySettings,
    target: Target[PreparedT],
    observer: RunObserver,
    clock: Clock | None = None,
    *,
    trace: Trace | None = None,
) -> ReplayResult:
    """Replay a trace against ``target``; ``trace`` is the one that the settings name, if it was
    loaded already.

    Raises :class:`BenchError` for settings that do not fit the trace or the endpoint, and
    :class:`WarmupFailed` if a warm-up request fails; failures after that are in the result.
    """
    clock = clock or MonotonicClock()
    trace = trace or load_trace(settings.trace)
    model = await target.model(settings.model)
    workload = shape_workload(trace, _fit(settings.shape, model))
    settings = _at_rate(settings, trace, workload)
    plan, warmups = _plan(settings, trace, workload, target=target, model=model)
    observer.prepared(workload, model)
    warm = await warm_up(target, warmups, timeout_s=settings.drain_timeout_s, clock=clock)
    if warm and warm[-1].status != "ok":
        raise WarmupFailed(f"warm-up request {len(warm)} failed: {warm[-1].error}")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    # The bodies live as long as the run: no collection need look at them while the clock runs.
    gc.collect()
    gc.freeze()
    try:
        records = await replay(
            target,
            plan,
            drain_timeout_s=settings.drain_timeout_s,
            clock=clock,
            observer=observer,
        )
    finally:
        gc.unfreeze()
    return ReplayResult(
        created=created,
        trace=asdict(trace.meta) | {"digest": trace.digest()},
        workload=asdict(workload.cut) | {"block_size": workload.block_size},
        target={"kind": target.kind, "address": target.address} | asdict(model),
        settings=_settings_values(settings),
        slo_s=dict(settings.slo_s),
        host=host_facts(),
        records=tuple(records),
        warmup=tuple(warm),
    )


class RunObserver(Observer, Protocol):
    """Is also told when the clock is about to start."""

    def prepared(self, workload: Workload, model: ServedModel) -> None:
        """All bodies are built."""
        ...


def _fit(shape: Shape, model: ServedModel) -> Shape:
    """Lower the limit on a row's tokens to what the model takes."""
    limits = [shape.max_total_tokens, model.max_model_len]
    return replace(
        shape, max_total_tokens=min((limit for limit in limits if limit is not None), default=None)
    )


def _due_s(settings: ReplaySettings, trace: Trace, workload: Workload) -> list[float]:
    return due_times_s(
        [row.arrival_s for row in workload.requests],
        speedup=settings.speedup,
        tick_s=trace.meta.tick_s,
        jitter=settings.tick_jitter,
        seed=settings.seed,
    )


def _at_rate(settings: ReplaySettings, trace: Trace, workload: Workload) -> ReplaySettings:
    """The settings with the speed-up that gives the rate they ask for."""
    if settings.rate_per_s is None:
        return settings
    due_s = _due_s(replace(settings, speedup=1.0), trace, workload)
    return replace(settings, speedup=speedup_for(due_s, settings.rate_per_s))


def _plan(
    settings: ReplaySettings,
    trace: Trace,
    workload: Workload,
    *,
    target: Target[PreparedT],
    model: ServedModel,
) -> tuple[list[PlannedRequest[PreparedT]], list[PlannedRequest[PreparedT]]]:
    """The requests to measure and those to warm up with, encoded."""
    vocab_size = settings.vocab_size or model.vocab_size
    if vocab_size is None:
        raise BenchError(
            f"{target.address} does not tell the vocabulary of {model.name}; give its size with "
            "--vocab-size (vocab_size in the model's config.json)"
        )
    maker = PromptMaker(
        trace.meta,
        digest=trace.digest(),
        seed=settings.seed,
        token_range=ordinary_tokens(vocab_size),
        block_size=workload.block_size,
    )
    due_s = _due_s(settings, trace, workload)

    def planned(name: str, index: int, row: TraceRequest, at_s: float) -> PlannedRequest[PreparedT]:
        request_id = f"bench-{settings.seed}-{name}"
        prompt = maker.tokens(name, row)
        return PlannedRequest(
            index=index,
            request_id=request_id,
            due_s=at_s,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            prepared=target.prepare(model, request_id, prompt, row.output_tokens),
        )

    measured = [
        planned(str(index), index, row, at_s)
        for (index, row), at_s in zip(workload.rows, due_s, strict=True)
    ]
    warmups = [
        planned(f"warmup-{index}", index, replace(row, hash_ids=None), 0.0)
        for index, row in workload.rows[: settings.warmup]
    ]
    return measured, warmups


def _settings_values(settings: ReplaySettings) -> dict[str, object]:
    values: dict[str, object] = asdict(settings)
    del values["shape"], values["slo_s"]
    return values | asdict(settings.shape) | {"scale_lengths": str(settings.shape.scale_lengths)}
