"""How many workers should prefill and how many decode: decided from their loads, with hysteresis.

Pure functions over a frozen state, with the clock passed in: a router runs them, and so does a
simulation. Loads are in workers: a `need` of 1.5 keeps one and a half busy. A split's load is that
of the phase that is loaded more, need over workers; the wanted split is the one with the least.
One worker is moved at a time, and only when

* a phase is loaded more than `min_load`, and the wanted split's load is less by `min_improvement`,
* that has been so for `dwell_s`, of loads averaged over about `window_s`,
* for `settle_s` about as many workers of each role were ready, whoever may move them,
* and no flip has failed for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from pdserve.types import Role

if TYPE_CHECKING:
    from pdserve.config import RolesConfig

# Ready workers of a role that come or go, by this share of them, make a new beginning.
CHANGED = 0.1
MAX_PAUSE_S = 3600.0


class Stance(StrEnum):
    """What is done now."""

    SETTLING = "settling"
    CALM = "calm"
    BALANCED = "balanced"
    DWELLING = "dwelling"
    PAUSED = "paused"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Loads:
    """Ready workers of each role, and how many of them the work at hand keeps busy."""

    prefill_workers: int
    decode_workers: int
    prefill_need: float
    decode_need: float

    @property
    def workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def prefill(self) -> float:
        """1 is all that the prefill workers can do; infinite where there is none."""
        return _share(self.prefill_need, self.prefill_workers)

    @property
    def decode(self) -> float:
        return _share(self.decode_need, self.decode_workers)

    @property
    def highest(self) -> float:
        return max(self.prefill, self.decode)

    def split(self, prefill_workers: int) -> Loads:
        """The same work on another split of the same workers."""
        return replace(
            self,
            prefill_workers=prefill_workers,
            decode_workers=self.workers - prefill_workers,
        )

    def best(self) -> Loads:
        """On the split with the least load, one worker a role at least; this one among equals."""
        most, need = self.workers - 1, self.prefill_need + self.decode_need
        if most < 1:
            return self
        ideal = self.workers * self.prefill_need / need if need else self.prefill_workers
        tried = {
            min(max(x, 1), most)
            for x in (math.floor(ideal), math.ceil(ideal), self.prefill_workers)
        }
        return min(
            (self.split(x) for x in sorted(tried)),
            key=lambda x: (x.highest, abs(x.prefill_workers - self.prefill_workers)),
        )


def _share(need: float, workers: int) -> float:
    return need / workers if workers else math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wanted of a model's workers, and why, in words. `role` is the role that one worker is
    to change to now, None where none is; `loads` are averages."""

    stance: Stance
    loads: Loads
    wanted: Loads
    text: str
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """State for one model: sums of looks that fade, and since when what was so.

    `began` is when the workers last changed; `wanted` the role that is wanted more of, since
    `wanted_since`; no flip before `paused_until`. `failed` are the workers whose flips failed, the
    last one for `failure`.
    """

    began: float
    seen: float
    prefill_workers: int
    decode_workers: int
    weight: float = 0.0
    prefill_sum: float = 0.0
    decode_sum: float = 0.0
    wanted: Role | None = None
    wanted_since: float = 0.0
    paused_until: float = -math.inf
    failed: tuple[str, ...] = ()
    failure: str = ""

    def means(self, now: Loads) -> Loads:
        """Averages, on the workers of now."""
        return replace(
            now,
            prefill_need=self.prefill_sum / self.weight,
            decode_need=self.decode_sum / self.weight,
        )


def begin(loads: Loads, now: float) -> Watch:
    """Of a model that was not watched until now."""
    return Watch(now, now, loads.prefill_workers, loads.decode_workers)


def look(watch: Watch, loads: Loads, now: float, config: RolesConfig) -> tuple[Watch, Verdict]:
    """Another look at a model's loads."""
    if _changed(watch, loads):
        watch = replace(
            begin(loads, now),
            paused_until=watch.paused_until,
            failed=watch.failed,
            failure=watch.failure,
        )
    watch = _add(watch, loads, now, config.window_s)
    loads = watch.means(loads)
    wanted = loads.best()
    role = _wanted_role(loads, wanted, config)
    if role is not watch.wanted:
        watch = replace(watch, wanted=role, wanted_since=now)
    return watch, _judge(watch, loads, wanted, now, config)


def flipped(watch: Watch, worker_id: str, failure: str, now: float, config: RolesConfig) -> Watch:
    """A flip that `look` asked for has ended, with a failure or without. Where it changed much, the
    next look begins anew."""
    if not failure:
        return replace(watch, failed=(), failure="")
    pause_s = min(MAX_PAUSE_S, config.failure_pause_s * 2.0 ** min(32, len(watch.failed)))
    failed = (*watch.failed, worker_id)[-64:]
    return replace(watch, paused_until=now + pause_s, failed=failed, failure=failure)


def _changed(watch: Watch, loads: Loads) -> bool:
    pairs = (
        (watch.prefill_workers, loads.prefill_workers),
        (watch.decode_workers, loads.decode_workers),
    )
    return any(abs(after - before) > CHANGED * before for before, after in pairs)


def _add(watch: Watch, loads: Loads, now: float, window_s: float) -> Watch:
    """Looks count by the time since the one before; the first as if it were a tenth of a window."""
    passed_s = now - watch.seen if watch.weight else 0.1 * window_s
    kept = math.exp(-passed_s / window_s)
    return replace(
        watch,
        seen=now,
        weight=kept * watch.weight + 1.0 - kept,
        prefill_sum=kept * watch.prefill_sum + (1.0 - kept) * loads.prefill_need,
        decode_sum=kept * watch.decode_sum + (1.0 - kept) * loads.decode_need,
    )


def _wanted_role(loads: Loads, wanted: Loads, config: RolesConfig) -> Role | None:
    """The role that should have more workers, if it matters and is worth it."""
    enough = loads.highest * (1.0 - config.min_improvement)
    if loads.highest <= config.min_load or wanted.highest > enough or wanted == loads:
        return None
    return Role.PREFILL if wanted.prefill_workers > loads.prefill_workers else Role.DECODE


def _judge(watch: Watch, loads: Loads, wanted: Loads, now: float, config: RolesConfig) -> Verdict:
    if watch.wanted is None:
        if loads.highest <= config.min_load:
            stance, why = Stance.CALM, f"no load is above {config.min_load:g}"
        else:
            stance, why = Stance.BALANCED, f"no split is better by {config.min_improvement:.0%}"
        return Verdict(stance, loads, loads, f"{_words(loads)}; {why}")
    settle_s = watch.began + config.settle_s - now
    paused_s = watch.paused_until - now
    dwell_s = watch.wanted_since + config.dwell_s - now
    role = None
    if settle_s > 0:
        stance, why = Stance.SETTLING, f"but workers have changed: waits {settle_s:.0f} s"
    elif paused_s > 0:
        stance, why = Stance.PAUSED, f"but waits {paused_s:.0f} s, for {watch.failure}"
    elif dwell_s > 0:
        stance, why = Stance.DWELLING, f"if that still holds in {dwell_s:.0f} s"
    else:
        stance, why, role = Stance.MOVE, f"one becomes a {watch.wanted} worker", watch.wanted
    split = f"{wanted.prefill_workers} and {wanted.decode_workers} are wanted"
    return Verdict(stance, loads, wanted, f"{_words(loads)}; {split}, {why}", role)


def _words(loads: Loads) -> str:
    return ", ".join(
        f"{count} {role} worker{'' if count == 1 else 's'}"
        + (f" loaded {load:.2f}" if count else "")
        for role, count, load in (
            (Role.PREFILL, loads.prefill_workers, loads.prefill),
            (Role.DECODE, loads.decode_workers, loads.decode),
        )
    )
