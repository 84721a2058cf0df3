"""Whether an engine gets on: a count that moves while it does, and whether there is work at all.

A step may take long and be well: a large chunk of a prompt, or code that is compiled at its first
use. So the layers of a step count too, where the engine hears of them. Where it does not, and in
the first steps of all, a step counts as getting on for a while by being in one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.types import WorkerLoad

# Steps in which code may still be compiled, and how long one step that cannot be looked into may
# take before it counts as hanging.
COLD_STEPS = 16
BLIND_S = 60.0
_TICK_S = 0.25


class ProgressBoard:
    """Written by the thread that steps the engine, read by any: each field is set at once, and a
    reader who meets two of different steps is mistaken for one look. The clock is the caller's."""

    def __init__(self, *, blind_s: float = BLIND_S) -> None:
        self.sees_layers = False
        self._blind_s = blind_s
        self._count = 0
        self._steps = 0
        self._began: float | None = None
        self._has_work = False

    def begin(self, now: float, *, has_work: bool) -> None:
        """A step begins; `has_work` says that it could compute something."""
        self._has_work = has_work
        self._began = now

    def tick(self) -> None:
        """A layer of the step is done."""
        self._count += 1

    def end(self, now: float, *, computed: bool, has_work: bool) -> None:
        """The step is over; `computed` says that it was one for some request."""
        self._count += self._grace(now)
        self._began = None
        self._has_work = has_work
        if computed:
            self._steps += 1
            self._count += 1

    def stamp(self, load: WorkerLoad, now: float, *, has_more: bool) -> WorkerLoad:
        """`load` with the progress as it is now; `has_more` for work that no step has seen yet."""
        count = self._count + self._grace(now)
        return replace(load, progress=count, has_work=self._has_work or has_more)

    def _grace(self, now: float) -> int:
        began = self._began
        if began is None or (self.sees_layers and self._steps >= COLD_STEPS):
            return 0
        return int(min(now - began, self._blind_s) / _TICK_S)
