"""Who used the processor while a replay ran."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from benchmarks.processes import processor_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.stack import Started


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Processor seconds in ``window_s``: of the driven arm's router and workers (None for an
    endpoint), of this client, of arms that only waited, and of everybody else on our cores."""

    window_s: float
    router_s: float | None
    workers_s: float | None
    client_s: float
    idle_arms_s: float
    others_s: float


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    router_s: float | None
    workers_s: float | None
    client_s: float
    idle_arms_s: float
    busy_s: float


class ProcessorMeter:
    """Reads the counters when made and again in :meth:`use`."""

    def __init__(self, driven: Started | None, idle: Sequence[Started]) -> None:
        self._driven = driven
        self._idle = idle
        self._first = self._read()

    def use(self) -> ProcessorUse:
        """What was used since."""
        first, last = self._first, self._read()
        ours = [
            (last.router_s or 0.0) - (first.router_s or 0.0),
            (last.workers_s or 0.0) - (first.workers_s or 0.0),
            last.client_s - first.client_s,
            last.idle_arms_s - first.idle_arms_s,
        ]
        return ProcessorUse(
            window_s=round(last.at_s - first.at_s, 3),
            router_s=None if self._driven is None else round(ours[0], 3),
            workers_s=None if self._driven is None else round(ours[1], 3),
            client_s=round(ours[2], 3),
            idle_arms_s=round(ours[3], 3),
            others_s=round(max(0.0, last.busy_s - first.busy_s - sum(ours)), 3),
        )

    def _read(self) -> _Reading:
        own = psutil.Process().cpu_times()
        driven = self._driven
        return _Reading(
            at_s=time.perf_counter(),
            router_s=None if driven is None else router_s(driven),
            workers_s=None if driven is None else workers_s(driven),
            client_s=own.user + own.system,
            idle_arms_s=sum(router_s(x) + workers_s(x) for x in self._idle),
            busy_s=_busy_s(),
        )


def router_s(arm: Started) -> float:
    """Processor time so far of what stands before the workers of an arm that serves."""
    assert arm.ready is not None
    return processor_s([arm.ready["router"]["pid"]])


def workers_s(arm: Started) -> float:
    """Processor time so far of all its workers."""
    assert arm.ready is not None
    return processor_s(worker["pid"] for worker in arm.ready["workers"])


def _busy_s() -> float:
    """Processor time spent on the cores that this process may use, by whomever."""
    mine = os.sched_getaffinity(0)
    total = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if core in mine:
            spent = sum(times) - times.idle - getattr(times, "iowait", 0.0)
            # Guests are counted in user and nice already.
            for name in ("guest", "guest_nice"):
                with contextlib.suppress(AttributeError):
                    spent -= getattr(times, name)
            total += spent
    return total
