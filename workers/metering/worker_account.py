"""Accounting of a worker's seconds and joules by request, waste and idle time.

The duration of each step is divided among its requests by the cost that each adds to it, according
to a model fitted to the worker's own steps. The fixed cost of a step is divided equally. Until
enough steps were measured, all tokens count the same. The shares of a step add up to its duration.

The share of a request that ends well is reported to its router with the request. Idle time and
wasted work are sent with lease renewals; each second is sent to exactly one router. The reports to
all routers therefore add up to the lifetime of the worker.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdserve.observe.step_costs import (
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

MIN_STEPS = 8.0  # measured steps before the first fit
REFIT_S = 10.0
# Costs that count each token the same, in the units of pdserve/observe/step_costs.py.
_BY_TOKENS = (0.0, PREFILL_TOKENS, 0.0, DECODE_REQS, 0.0)
# Work for a request that ended or was cancelled before the step was done. It occurs because
# asynchronous scheduling detects an end one step late.
OVERRUN = "overrun"
# Below this share of busy time, a reading counts as the power of an idle worker.
_IDLE_SHARE = 0.01
# Longest predicted prompt / longest measured prompt.
_REACH = 2


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
    """Step time used by one request, in seconds."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


class BusyTime:
    """The shares of open requests, and `busy_s`, the duration of all steps. Only the engine's step
    thread calls `name`, `begin` and `step`, and sets `expert_tokens`, how often an expert here
    computed a token; any thread may call the other methods."""

    def __init__(self) -> None:
        self.recorder = StepRecorder()
        self.busy_s = 0.0
        self.expert_tokens = 0
        self._overrun = Share()
        self._shares: dict[Hashable, Share] = {}  # by stream id, and by the engine's key
        self._keys: dict[int, Hashable] = {}
        self._under_way, self._since = 0, 0.0
        self._costs: Sequence[float] = _BY_TOKENS
        self._fitted_at = -math.inf
        self._fitted_end = 0  # the longest prompt among the fitted steps
        self._lock = threading.Lock()

    def open(self, stream_id: int) -> None:
        """Open the share of a new request. Its key is its stream id until `name` is called."""
        with self._lock:
            self._shares[stream_id] = Share()

    def name(self, stream_id: int, key: Hashable) -> None:
        """Set the engine's key of this request. Ignored if it was closed meanwhile."""
        with self._lock:
            if (share := self._shares.get(stream_id)) is not None:
                self._shares[key], self._keys[stream_id] = share, key

    def close(self, stream_id: int) -> Share:
        """Remove and return the share of an ended request; an empty share if it is unknown."""
        with self._lock:
            self._shares.pop(self._keys.pop(stream_id, None), None)
            return self._shares.pop(stream_id, None) or Share()

    def begin(self, now: float) -> None:
        """Record the start of a step, or that one starts when earlier steps are done."""
        self._since = self._since if self._under_way else now
        self._under_way += 1

    def step(self, work: StepWork, seconds: float, now: float) -> None:
        """Divide a step that took `seconds` and ended at `now`. `work` must not be empty."""
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
        """Return the fitted costs if they cover such a step, else equal costs per token."""
        if now - self._fitted_at >= REFIT_S:
            moments = self.recorder.moments(now)
            both = total((moments.prefill, moments.decode))
            if both.steps >= MIN_STEPS:
                self._costs, self._fitted_at = fit_costs(both), now
                self._fitted_end = both.end
        is_new = shape.prefill_tokens and not self._costs[1] + self._costs[2]
        return _BY_TOKENS if is_new or _predicted(self._costs, shape) <= 0 else self._costs

    def predicted_s(self, shape: StepShape, now: float) -> float | None:
        """Return the expected duration of a step, or None if no measured step resembles it."""
        costs = self._costs_of(shape, now)
        is_near = shape.prefill_end <= _REACH * self._fitted_end
        return _predicted(costs, shape) if is_near and costs is not _BY_TOKENS else None

    def busy_until(self, now: float) -> float:
        """Return `busy_s` plus the elapsed time of the current step."""
        with self._lock:
            return self.busy_s + (max(0.0, now - self._since) if self._under_way else 0.0)

    def open_s(self) -> float:
        """Return the sum of the shares of all open requests, in seconds."""
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
    """Divides the joules of a counter into idle and busy time, and busy joules among requests by
    their busy seconds.

    If a request ends between two readings, its seconds since the last reading are charged at the
    power of the last busy time. The next reading corrects later charges, so that the sum equals the
    measured energy.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None  # joules, time, busy seconds
        self._idle_watts: float | None = None
        self._busy_watts = self._idle_j = self._pool_j = 0.0  # joules not taken yet
        self._taken_s = 0.0  # busy seconds whose joules were taken

    def read(self, joules: float, now: float, busy_s: float) -> None:
        """Record a reading of the counter. `busy_s`: total seconds of work so far."""
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
        """Take the joules of `seconds` of work. `busy_s`: total seconds of work so far."""
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
    """Idle time and waste outside of request reports, until they are reported to a router. `meter`
    is None if energy is not measured. Times are on the clock of the engine's steps."""

    def __init__(self, busy: BusyTime, now: float) -> None:
        self.busy = busy
        self.meter: EnergyMeter | None = None
        self._began, self._idle_told_s = now, 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._joules: defaultdict[str, float] = defaultdict(float)

    def settle(self, stream_id: int) -> tuple[Share, float | None]:
        """Close a successful request. Return its seconds and joules."""
        share = self.busy.close(stream_id)
        return share, self._energy(share.total_s)

    def waste(self, stream_id: int, reason: str) -> None:
        """Close a request whose work no answer uses, and count it as waste."""
        self._add(reason, self.busy.close(stream_id).total_s)

    def _add(self, reason: str, seconds: float) -> None:
        if seconds:
            self._seconds[reason] += seconds
            self._joules[reason] += self._energy(seconds) or 0.0

    def _energy(self, seconds: float) -> float | None:
        return None if self.meter is None else self.meter.take(seconds, self.busy.busy_s)

    def claim(self, now: float, routers: int) -> Account:
        """Return the amounts not reported yet, to send to one of `routers` routers."""
        idle_s = max(0.0, now - self._began - self.busy.busy_until(now) - self._idle_told_s)
        self._idle_told_s += idle_s
        self._seconds[IDLE] += idle_s
        self._add(OVERRUN, self.busy.take_overrun())
        if self.meter is not None:
            self._joules[IDLE] += self.meter.take_idle()
        open_s, joules = self.busy.open_s() / max(1, routers), self._joules if self.meter else {}
        claimed = Account(dict(self._seconds), dict(joules), open_s, self.busy.busy_s)
        self._seconds.clear()
        self._joules.clear()
        return claimed

    def give_back(self, account: Account) -> None:
        """Add back an account that could not be sent."""
        for returned, kept in ((account.seconds, self._seconds), (account.energy_j, self._joules)):
            for kind, amount in returned.items():
                kept[kind] += amount
