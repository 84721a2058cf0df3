"""What the seconds and joules of a worker were used for.

The duration of each step is shared among its requests by what each adds to it, as a model fitted to
the worker's own steps says; the part that all steps have is shared equally. Until enough steps were
measured, each token counts the same. The shares of a step add up to its duration.

A request that ends well takes its share to its router. The rest, idle time and work that no answer
needs, is told to routers with the renewals of the lease, each second to one of them. So what all
routers were told adds up to the time that the worker was there.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdserve.step_moments import (
    DECODE_KV_TOKENS,
    DECODE_REQS,
    PREFILL_PAIRS,
    PREFILL_TOKENS,
    StepRecorder,
    StepShape,
    fit_costs,
    total,
)
from pdserve.types import IDLE, Account

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

MIN_STEPS = 8.0  # before they are fitted
REFIT_S = 10.0
# A step in which each token counts the same, in the units of pdserve/step_moments.py.
_BY_TOKENS = (0.0, PREFILL_TOKENS, 0.0, DECODE_REQS, 0.0)
# Work for a request that had ended, or was cancelled, when the step was done. With asynchronous
# scheduling the engine learns of an end one step late.
OVERRUN = "overrun"
# A reading after less work than this share of the time shows the draw of an idle worker.
_IDLE_SHARE = 0.01


class StepWork(NamedTuple):
    """The requests of a step, by the engine's keys. `prompts`: (key, tokens computed in the step,
    tokens before them); `decoding`: (key, tokens of context)."""

    prompts: Sequence[tuple[Hashable, int, int]]
    decoding: Sequence[tuple[Hashable, int]]

    @property
    def shape(self) -> StepShape:
        return StepShape(
            prefill_tokens=sum(count for _, count, _ in self.prompts),
            prefill_pairs=sum(count * (before + count / 2) for _, count, before in self.prompts),
            prefill_end=max((before + count for _, count, before in self.prompts), default=0),
            decode_reqs=len(self.decoding),
            decode_kv_tokens=sum(context for _, context in self.decoding),
        )


@dataclass(slots=True)
class Share:
    """Seconds of steps that one request took."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


class BusyTime:
    """State: the shares of open requests, and `busy_s`, the duration of all steps. The thread of
    the engine's steps calls `name`, `begin` and `step`, any thread the rest."""

    def __init__(self) -> None:
        self.recorder = StepRecorder()
        self.busy_s = 0.0
        self._overrun = Share()
        self._shares: dict[Hashable, Share] = {}  # by stream id, and by the engine's key
        self._keys: dict[int, Hashable] = {}
        self._under_way, self._since = 0, 0.0
        self._costs: Sequence[float] = _BY_TOKENS
        self._fitted_at = -math.inf
        self._lock = threading.Lock()

    def open(self, stream_id: int) -> None:
        """Share steps with a new request. Its key is its stream id until it is named."""
        with self._lock:
            self._shares[stream_id] = Share()

    def name(self, stream_id: int, key: Hashable) -> None:
        """The engine calls this request `key`. Ignored if it was closed meanwhile."""
        with self._lock:
            if (share := self._shares.get(stream_id)) is not None:
                self._shares[key], self._keys[stream_id] = share, key

    def close(self, stream_id: int) -> Share:
        """Return the share of a request that has ended; none for an unknown one."""
        with self._lock:
            self._shares.pop(self._keys.pop(stream_id, None), None)
            return self._shares.pop(stream_id, None) or Share()

    def begin(self, now: float) -> None:
        """A step begins, or will begin when those before it are done."""
        self._since = self._since if self._under_way else now
        self._under_way += 1

    def step(self, work: StepWork, seconds: float, now: float) -> None:
        """Share out a step that took `seconds` and ended at `now`. `work` must not be empty."""
        shape = work.shape
        self.recorder.observe(shape, seconds, now)
        costs = self._costs_of(shape, now)
        scale = seconds / _predicted(costs, shape)
        each = costs[0] * scale / (len(work.prompts) + len(work.decoding))
        token, pair = costs[1] * scale / PREFILL_TOKENS, costs[2] * scale / PREFILL_PAIRS
        request, context_token = (
            each + costs[3] * scale / DECODE_REQS,
            costs[4] * scale / DECODE_KV_TOKENS,
        )
        with self._lock:
            find, overrun = self._shares.get, self._overrun
            for key, count, before in work.prompts:
                share = find(key) or overrun
                share.prefill_s += each + count * (token + pair * (before + count / 2))
            for key, context in work.decoding:
                (find(key) or overrun).decode_s += request + context_token * context
            self.busy_s += seconds
            self._under_way = max(0, self._under_way - 1)
            self._since = now

    def _costs_of(self, shape: StepShape, now: float) -> Sequence[float]:
        """Return the fitted costs, if they are known for such a step."""
        if now - self._fitted_at >= REFIT_S:
            moments = self.recorder.moments(now)
            both = total((moments.prefill, moments.decode))
            if both.steps >= MIN_STEPS:
                self._costs, self._fitted_at = fit_costs(both), now
        is_new = shape.prefill_tokens and not self._costs[1] + self._costs[2]
        return _BY_TOKENS if is_new or _predicted(self._costs, shape) <= 0 else self._costs

    def busy_until(self, now: float) -> float:
        """Return `busy_s` with the time so far of the step under way."""
        with self._lock:
            return self.busy_s + (max(0.0, now - self._since) if self._under_way else 0.0)

    def open_s(self) -> float:
        """Return the shares of all open requests."""
        with self._lock:
            return sum(x.total_s for key, x in self._shares.items() if isinstance(key, int))

    def take_overrun(self) -> float:
        """Return the seconds of OVERRUN since the last call."""
        with self._lock:
            overrun, self._overrun = self._overrun, Share()
        return overrun.total_s


def _predicted(costs: Sequence[float], shape: StepShape) -> float:
    return sum(cost * feature for cost, feature in zip(costs, shape.features, strict=True))


class EnergyMeter:
    """Splits a counter of joules into those of idle and of busy time, and the latter among requests
    by their busy seconds.

    A request that ends between two readings pays for the seconds since the last one at the power of
    the last busy time. The next reading corrects this for those that follow, so that the sum is
    what was measured.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None  # joules, time, busy seconds
        self._idle_watts: float | None = None
        self._busy_watts = self._idle_j = self._pool_j = 0.0  # joules that were not taken yet
        self._taken_s = 0.0  # busy seconds whose joules were taken

    def read(self, joules: float, now: float, busy_s: float) -> None:
        """Take a reading of the counter after `busy_s` seconds of work in all."""
        last = self._last
        if last is not None and now <= last[1]:
            return
        self._last = (joules, now, busy_s)
        if last is None:
            self._taken_s = busy_s
            return
        used_j, elapsed_s = max(0.0, joules - last[0]), now - last[1]
        worked_s = min(elapsed_s, max(0.0, busy_s - last[2]))
        idle_j = used_j
        if worked_s < _IDLE_SHARE * elapsed_s:
            self._idle_watts = used_j / elapsed_s
        else:
            mean_watts = used_j / elapsed_s
            watts = mean_watts if self._idle_watts is None else self._idle_watts
            idle_j = min(used_j, watts * (elapsed_s - worked_s))
            self._busy_watts = (used_j - idle_j) / worked_s
        self._idle_j += idle_j
        self._pool_j += used_j - idle_j

    def take(self, seconds: float, busy_s: float) -> float:
        """Return the joules of `seconds` of the work whose joules were not taken yet, of `busy_s`
        seconds in all."""
        if self._last is None or seconds <= 0:
            return 0.0
        left_j = self._pool_j + self._busy_watts * max(0.0, busy_s - self._last[2])
        joules = max(0.0, left_j * seconds / max(seconds, busy_s - self._taken_s))
        self._taken_s += seconds
        self._pool_j -= joules
        return joules

    def take_idle(self) -> float:
        """Return the joules of idle time since the last call."""
        idle_j, self._idle_j = self._idle_j, 0.0
        return idle_j


class WorkerAccount:
    """What no request's report has: idle time and waste, until a router is told. `meter` is None if
    energy is not measured. Times are on the clock of the engine's steps."""

    def __init__(self, busy: BusyTime, now: float) -> None:
        self.busy = busy
        self.meter: EnergyMeter | None = None
        self._began, self._idle_told_s = now, 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._joules: defaultdict[str, float] = defaultdict(float)

    def settle(self, stream_id: int) -> tuple[Share, float | None]:
        """Return the seconds and the joules of a request that ended well."""
        share = self.busy.close(stream_id)
        return share, self._energy(share.total_s)

    def waste(self, stream_id: int, reason: str) -> None:
        """No answer has the work of this request."""
        self._add(reason, self.busy.close(stream_id).total_s)

    def _add(self, reason: str, seconds: float) -> None:
        if seconds:
            self._seconds[reason] += seconds
            self._joules[reason] += self._energy(seconds) or 0.0

    def _energy(self, seconds: float) -> float | None:
        return None if self.meter is None else self.meter.take(seconds, self.busy.busy_s)

    def claim(self, now: float, routers: int) -> Account:
        """Return what was not told yet, for one of `routers`."""
        idle_s = max(0.0, now - self._began - self.busy.busy_until(now) - self._idle_told_s)
        self._idle_told_s += idle_s
        self._seconds[IDLE] += idle_s
        self._add(OVERRUN, self.busy.take_overrun())
        if self.meter is not None:
            self._joules[IDLE] += self.meter.take_idle()
        open_s, joules = self.busy.open_s() / max(1, routers), self._joules if self.meter else {}
        told = Account(dict(self._seconds), dict(joules), open_s, self.busy.busy_s)
        self._seconds.clear()
        self._joules.clear()
        return told

    def give_back(self, account: Account) -> None:
        """The router was not told after all."""
        for told, kept in ((account.seconds, self._seconds), (account.energy_j, self._joules)):
            for kind, amount in told.items():
                kept[kind] += amount
