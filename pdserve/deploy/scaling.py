"""How many workers each role should have, decided from their load. No I/O, and no clock of its own.

A load is in workers: a need of 1.5 keeps one and a half busy. It includes what the SLOs ask for,
because the need of decode is measured against the TPOT limit (`router/roles.py`). The scaler
changes totals; `router.roles.auto` moves workers between roles at a fixed total. Use one of them.
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

# Rounding must not ask for a worker more.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fewest and most workers of a role."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"needs 1 <= least <= most, not {self.least} and {self.most}")


@dataclass(slots=True)
class _RoleState:
    """Workers wanted, since when, and the needs seen in the last `down_after_s` by time."""

    wanted: int
    changed_at: float = math.inf
    seen: deque[tuple[float, float]] = field(default_factory=deque)


class Scaler:
    """State: the workers wanted of each role of one model, and whether it is at zero.

    Workers are added if the load was above `target_load` on average over `up_after_s`: at most as
    many as there are. One is removed if those left would have been below it on average over
    `up_after_s` and over `down_after_s`. Both times start anew after every change. With
    `to_zero_after_s` all workers of the model stop after so long without any load, and the first
    load brings the fewest of each role back.
    """

    def __init__(
        self, bounds: Mapping[Role, Bounds], rules: ScalingConfig, present: Mapping[Role, int]
    ) -> None:
        """`present` has the workers that there are, from which it goes on, within the bounds."""
        self._bounds = bounds
        self._rules = rules
        self._roles = {
            role: _RoleState(min(max(present[role], limits.least), limits.most))
            for role, limits in bounds.items()
        }
        self._is_at_zero = rules.to_zero_after_s > 0 and not any(present.values())
        self._loaded_at: float | None = None

    def decide(self, needs: Mapping[Role, float], now: float) -> dict[Role, int]:
        """Return the workers wanted by role, given the need of each; `now` never goes back. A role
        without a need keeps its number: nothing is known of its load."""
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
            """Return the workers that the average need of the last `window_s` asks for."""
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
