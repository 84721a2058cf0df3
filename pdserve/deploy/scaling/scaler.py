"""Number of workers for each role, decided from the load. No I/O, and no clock of its own.

The unit of a need is workers: a need of 1.5 keeps one and a half workers busy. Needs include the
SLOs, because the need of decode is measured against the TPOT limit
(`router/control/autoscaler.py`). The scaler changes totals; `router.roles.auto` moves workers
between roles at a fixed total. Use only one of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import ScalingConfig
    from pdserve.types import Role

# Prevents a rounding error from adding a worker.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Bounds:
    """Minimum and maximum number of workers of a role."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"needs 1 <= least <= most, not {self.least} and {self.most}")


@dataclass(slots=True)
class _RoleState:
    """The wanted number of workers, the time of its last change, and (time, need) of the last
    `down_after_s`."""

    wanted: int
    changed_at: float = math.inf
    seen: deque[tuple[float, float]] = field(default_factory=deque)


class Scaler:
    """Decides the number of workers of one model. State: the wanted number of each role, and
    whether the model is scaled to zero.

    Workers are added if the average load over `up_after_s` was above `target_load`. One change at
    most doubles the number. One worker is removed if the average load of the remaining ones would
    have been below `target_load` over `up_after_s` and over `down_after_s`. Both windows restart
    after every change. With `to_zero_after_s` all workers of the model stop after that time without
    load. The first load then starts the minimum of each role.
    """

    def __init__(
        self, bounds: Mapping[Role, Bounds], rules: ScalingConfig, present: Mapping[Role, int]
    ) -> None:
        """`present`: the current number of workers by role. It is the start value, within the
        bounds."""
        self._bounds = bounds
        self._rules = rules
        self._roles = {
            role: _RoleState(min(max(present[role], limits.least), limits.most))
            for role, limits in bounds.items()
        }
        self._is_at_zero = rules.to_zero_after_s > 0 and not any(present.values())
        self._loaded_at: float | None = None

    def decide(self, needs: Mapping[Role, float], now: float) -> dict[Role, int]:
        """Return the wanted number of workers by role, given the need of each. `now` must not
        decrease. A role that is not in `needs` keeps its number, because its load is unknown."""
        if self._rules.to_zero_after_s:
            self._look_for_zero(needs, now)
        if self._is_at_zero:
            return dict.fromkeys(self._roles, 0)
        for role, need in needs.items():
            if role in self._roles:
                self._look(self._roles[role], self._bounds[role], need, now)
        return {role: state.wanted for role, state in self._roles.items()}

    def _look_for_zero(self, needs: Mapping[Role, float], now: float) -> None:
        is_unknown = not needs and not self._is_at_zero
        if is_unknown or any(needs.values()) or self._loaded_at is None:
            self._loaded_at = now
        if self._is_at_zero and any(needs.values()):
            self._is_at_zero = False
            for role, bounds in self._bounds.items():
                self._roles[role] = _RoleState(bounds.least)
        elif now - self._loaded_at >= self._rules.to_zero_after_s:
            self._is_at_zero = True

    def _look(self, state: _RoleState, bounds: Bounds, need: float, now: float) -> None:
        rules, seen = self._rules, state.seen
        state.changed_at = min(state.changed_at, now)
        seen.append((now, need))
        while now - seen[0][0] > rules.down_after_s:
            seen.popleft()

        def enough(window_s: float) -> int:
            """Return the number of workers for the average need of the last `window_s`."""
            recent = fmean(need for at, need in seen if now - at <= window_s)
            return min(
                max(math.ceil(recent / rules.target_load - _SLACK), bounds.least), bounds.most
            )

        soon, before = enough(rules.up_after_s), state.wanted
        if soon > before and now - state.changed_at >= rules.up_after_s:
            state.wanted = min(soon, 2 * before)
        elif now - state.changed_at >= rules.down_after_s:
            state.wanted -= max(soon, enough(rules.down_after_s)) < before
        if state.wanted != before:
            state.changed_at = now
