"""Whether processes grow: their memory over time, each life of each process by itself.

Two measures. *Resident* memory is what `ps` shows. It counts what processes share: a worker has its
own KV cache in shared memory, and maps those of its peers when it links to them and lets go of them
when they die, so that it moves by a whole cache with every kill. *Private* memory is anonymous
(RssAnon of proc(5)): heap and stacks. What leaks is there, and it is what is judged. USS would not
do: a page of a shared cache counts in it as long as one process alone has touched it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MIB: Final = 1 << 20
# Seconds of a life, a third of the run at most, that do not count: stores fill that have a bound.
WARM_UP_S: Final = 600.0
# Seconds that a slope is taken over, a third of the run at most; of a life with fewer none is told.
LEAST_S: Final = 300.0
# A slope is told from noise in a run of so many seconds. It may be so steep, in MiB an hour: at six
# requests a second 3 KiB of each.
JUDGED_S: Final = 1200.0
STEEPEST: Final = 64.0
# Ends are medians of so many samples, that no moment counts for all.
_AT_ENDS: Final = 5
_KV_CACHE: Final = re.compile(r" (\d+) +/memfd:pdserve-kv ")


@dataclass(frozen=True, slots=True)
class Weight:
    """In bytes."""

    resident: int
    private: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One life of a process behind its warm-up: since when (seconds into the run) and for how long
    it was looked at, MiB at both ends, and MiB an hour between (Theil-Sen: the median of the slopes
    of all pairs of samples)."""

    name: str
    pid: int
    since_s: float
    seconds: float
    private_mib: tuple[float, float]
    resident_mib: tuple[float, float]
    private_mib_per_h: float
    resident_mib_per_h: float


def weigh(pid: int, *, alone: bool) -> Weight | None:
    """Of a process, and unless `alone` of all that it has started. None where it is gone."""
    resident = private = 0
    try:
        top = psutil.Process(pid)
        for process in (top, *(() if alone else top.children(recursive=True))):
            seen = process.memory_info()
            resident += seen.rss
            private += seen.rss - seen.shared
    except psutil.NoSuchProcess:
        return None
    return Weight(resident, private) if resident else None  # nobody has waited for it yet


def kv_caches(pids: Iterable[int]) -> set[str]:
    """The KV caches in shared memory that these processes map, their own and others', by inode."""
    found: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        except OSError:
            continue
        found.update(_KV_CACHE.findall(maps))
    return found


class Memory:
    """State: samples by name and pid."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[tuple[float, Weight]]] = defaultdict(list)

    def take(self, name: str, pid: int, at_s: float, weight: Weight) -> None:
        """One sample."""
        self._samples[name, pid].append((at_s, weight))

    def growths(self, run_s: float) -> tuple[list[Growth], Counter[str]]:
        """Of a run of so long: the lives that can be told of, and how many of each name were too
        short."""
        warm_up_s, least_s = min(WARM_UP_S, run_s / 3), min(LEAST_S, run_s / 3)
        told, short = [], Counter[str]()
        for (name, pid), samples in self._samples.items():
            warm = [x for x in samples if x[0] - samples[0][0] >= warm_up_s]
            if len(warm) < 2 or warm[-1][0] - warm[0][0] < 0.9 * least_s:
                short[name] += 1
            else:
                told.append(_growth(name, pid, warm))
        return told, short


def _growth(name: str, pid: int, samples: Sequence[tuple[float, Weight]]) -> Growth:
    times = [at for at, _ in samples]
    private = [weight.private / _MIB for _, weight in samples]
    resident = [weight.resident / _MIB for _, weight in samples]
    return Growth(
        name=name,
        pid=pid,
        since_s=round(times[0], 1),
        seconds=round(times[-1] - times[0], 1),
        private_mib=_ends(private),
        resident_mib=_ends(resident),
        private_mib_per_h=_slope_per_h(times, private),
        resident_mib_per_h=_slope_per_h(times, resident),
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    first, last = np.median(values[:_AT_ENDS]), np.median(values[-_AT_ENDS:])
    return round(float(first), 1), round(float(last), 1)


def _slope_per_h(times: Sequence[float], values: Sequence[float]) -> float:
    x, y = np.array(times), np.array(values)
    earlier, later = np.triu_indices(len(x), k=1)
    slopes = (y[later] - y[earlier]) / (x[later] - x[earlier])
    return round(3600 * float(np.median(slopes)), 2)


def too_steep(growths: Iterable[Growth], run_s: float) -> list[str]:
    """The processes that grow too fast, where the run was long enough to say so."""
    if run_s < JUDGED_S:
        return []
    return [
        f"{x.name} grew by {x.private_mib_per_h:g} MiB of private memory an hour; "
        f"{STEEPEST:g} is the most"
        for x in growths
        if x.private_mib_per_h > STEEPEST
    ]
