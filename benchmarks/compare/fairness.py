"""Checks that the variants of a comparison have equal settings, and that it is valid."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.compare.result import ProcessorUse, VariantSettings
from benchmarks.metrics import summarise
from benchmarks.service import processor_s
from benchmarks.stats import MIN_ROUNDS
from router.fleet.billing import price_s, sum_known

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from benchmarks.compare.result import CompareResult
    from pdserve.types import WorkerInfo

KV_TOKENS: Final = "kv_cache_tokens"
# Relative tolerance: the size of a profiled KV cache varies by a few blocks between starts.
KV_TOLERANCE: Final = 0.01
# Most CPU cores that a waiting variant may use.
IDLE_CORES: Final = 0.06
# Share of the cores that other processes may use without a caution, and without making the
# comparison invalid.
OTHERS_SHARE: Final = 0.1
OTHERS_SHARE_LIMIT: Final = 0.25
_HOUR_S: Final = 3600.0
_SHARES: Final = {"cores", "gpus"}
_OF_MODEL: Final = ("max_model_len", "vocab_size", "dtype")
_OF_WORKER: Final = ("engine", "block_size")
_OF_LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens")
_NOT_BUSY: Final = ("idle", "iowait", "guest", "guest_nice")


def settings_of(
    workers: Sequence[WorkerInfo], prices: Mapping[str, float] | None = None
) -> VariantSettings:
    """Return the summary of the workers' registrations. `prices` are `router.prices`."""
    per_second = sum_known(price_s(prices or {}, worker) for worker in workers)
    roles = Counter(worker.role.value for worker in workers)
    values: dict[str, set[str]] = {}
    for worker in workers:
        facts = {"model": worker.model.name, "model_path": worker.model.path, **worker.settings}
        facts |= {name: str(getattr(worker.model, name)) for name in _OF_MODEL}
        facts |= {name: str(getattr(worker, name)) for name in _OF_WORKER}
        facts |= {name: str(getattr(worker.limits, name)) for name in _OF_LIMITS}
        for name, value in facts.items():
            values.setdefault(name, set()).add(value)
    return VariantSettings(
        workers={x: roles[x] for x in ("prefill", "decode", "aggregated") if x in roles},
        cores=sum(worker.cores for worker in workers),
        kv_cache_tokens=sum(worker.block_size * worker.total_blocks for worker in workers),
        of_workers={name: tuple(sorted(found)) for name, found in sorted(values.items())},
        gpus=len({x for worker in workers for x in worker.gpus}),
        price_per_hour=None if per_second is None else per_second * _HOUR_S,
    )


def differences(
    variants: Mapping[str, VariantSettings | None], differ: Collection[str] = ()
) -> dict[str, str]:
    """Return the settings that are not equal in all variants, except those in `differ`. The value
    is a text with the setting of each variant."""
    known = {name: found for name, found in variants.items() if found is not None}
    facts = {
        name: {setting: "/".join(values) for setting, values in s.of_workers.items()}
        | {share: str(getattr(s, share)) for share in (*_SHARES, KV_TOKENS)}
        for name, s in known.items()
    }
    tokens = [s.kv_cache_tokens for s in known.values()] or [0]
    alike = {KV_TOKENS} if max(tokens) - min(tokens) <= KV_TOLERANCE * max(tokens) else set()
    found = {}
    for setting in sorted({x for each in facts.values() for x in each} - {*differ} - alike):
        values = {name: each.get(setting, "-") for name, each in facts.items()}
        if len(set(values.values())) > 1:
            found[setting] = ", ".join(f"{name} {value}" for name, value in values.items())
    return found


@dataclass(frozen=True, slots=True)
class Validity:
    """Reasons why the comparison is invalid, and cautions for the reader."""

    invalid: tuple[str, ...]
    cautions: tuple[str, ...]


def judge(result: CompareResult) -> Validity:
    return Validity(tuple(_reasons(result)), tuple(_cautions(result)))


def _reasons(result: CompareResult) -> Iterator[str]:
    settings = {variant.name: variant.settings for variant in result.variants}
    for name, values in differences(settings, result.differ).items():
        yield f"the variants differ in {name}: {values}"
    for measurement in result.measurements:
        where = f"{measurement.kind} {measurement.number + 1} of {measurement.variant}"
        for note in measurement.notes:
            yield f"{where}: {note}"
        degraded = summarise(measurement.records).degraded
        if degraded is not None:
            yield f"{where}: {degraded}"
        use = measurement.processor
        if use.idle_s > IDLE_CORES * max(1, len(result.variants) - 1) * use.window_s:
            yield f"{where}: idle variants used {use.idle_s / use.window_s:.2f} cores"
    share = _others_share(result)
    if share > OTHERS_SHARE_LIMIT:
        yield f"other processes used {share:.0%} of the cores; measure on a quieter machine"
    for variant in result.variants:
        records = [r for m in result.of(variant.name, "round") for r in m.records]
        if records and not any(record.status == "ok" for record in records):
            yield f"{variant.name} answered no request of any round"


def _cautions(result: CompareResult) -> Iterator[str]:
    if not result.is_complete:
        yield "incomplete: the run was interrupted; --resume continues it"
    for name, values in differences({x.name: x.settings for x in result.variants}).items():
        if name in result.differ:
            yield f"differs on purpose: {name}: {values}"
    for variant in result.variants:
        if variant.kind == "endpoint":
            yield f"{variant.name}: settings unknown, so nothing shows that it is set as the others"
    rounds = max((m.number + 1 for m in result.measurements if m.kind == "round"), default=0)
    if rounds < MIN_ROUNDS:
        yield f"no intervals below {MIN_ROUNDS} rounds"
    repeated = sum(m.repeated for m in result.measurements)
    if repeated:
        yield (
            f"{repeated} of {len(result.measurements)} replays were repeated because the client "
            "was late"
        )
    share = _others_share(result)
    if OTHERS_SHARE < share <= OTHERS_SHARE_LIMIT:
        yield f"other processes used {share:.0%} of the cores"
    cores = result.host.get("cores", 0)
    used = max((x.settings.cores for x in result.variants if x.settings is not None), default=0)
    if 0 < cores <= used:
        yield f"workers have all {cores} cores; router and client share these"


def _others_share(result: CompareResult) -> float:
    cores = result.host.get("cores", 0)
    window_s = sum(m.processor.window_s for m in result.measurements)
    if not cores or not window_s:
        return 0.0
    return float(sum(m.processor.others_s for m in result.measurements) / window_s / cores)


class ProcessorMeter:
    """Measures CPU time from its creation to the call of `use`. `driven` and `idle` are the ready
    files of the measured and of the waiting variants. `driven` is empty for an endpoint."""

    def __init__(self, driven: Mapping[str, Any], idle: Sequence[Mapping[str, Any]]) -> None:
        self._is_endpoint = not driven
        self._router = [driven["router"]["pid"]] if driven else []
        self._workers = [x["pid"] for x in driven.get("workers", ())]
        self._idle = [x["pid"] for ready in idle for x in (ready["router"], *ready["workers"])]
        self._first = self._read()

    def use(self) -> ProcessorUse:
        last = self._read()
        spent = {name: round(last[name] - first, 3) for name, first in self._first.items()}
        others_s = spent.pop("busy_s") - sum(spent.values()) + spent["window_s"]
        known = spent | {"router_s": None, "workers_s": None} if self._is_endpoint else spent
        return ProcessorUse(**known, others_s=max(0.0, round(others_s, 3)))

    def _read(self) -> dict[str, float]:
        own = psutil.Process().cpu_times()
        every = psutil.cpu_times(percpu=True)
        busy = [every[core]._asdict() for core in os.sched_getaffinity(0)]
        return {
            "window_s": time.perf_counter(),
            "router_s": processor_s(self._router),
            "workers_s": processor_s(self._workers),
            "client_s": own.user + own.system,
            "idle_s": processor_s(self._idle),
            # All processes on our cores. `guest` times are already included in user and nice.
            "busy_s": sum(x for core in busy for k, x in core.items() if k not in _NOT_BUSY),
        }
