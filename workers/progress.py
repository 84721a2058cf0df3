"""Whether an engine gets on: a count that moves while it does, whether there is work at all, and
how long the step that is under way may show nothing.

A step may take long and be well: a large chunk of a prompt, or code that is compiled at its first
use. So the layers of a step count too, where the engine hears of them; and what steps of as many
tokens took tells how long one may take (`workers/step_bounds.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.step_bounds import UNKNOWN_S, StepBounds

if TYPE_CHECKING:
    from pdserve.types import WorkerLoad

# Steps in which code may still be compiled.
COLD_STEPS = 16


class ProgressBoard:
    """Written by the thread that steps the engine, read by any: each field is set at once, and a
    reader who meets two of different steps is mistaken for one look. The clock is the caller's."""

    def __init__(self) -> None:
        self.sees_layers = False
        self._bounds = StepBounds()
        self._count = 0
        self._steps = 0
        self._tokens = 0
        self._began = 0.0
        self._allowance_s = 0.0
        self._has_work = False

    def begin(self, now: float, *, has_work: bool) -> None:
        """A step begins; `has_work` says that it could compute something."""
        self._has_work = has_work
        self._began = now

    def sized(self, tokens: int) -> None:
        """So many tokens are to be computed in the step."""
        is_cold = self._steps < COLD_STEPS
        allowance_s = self._bounds.allowance_s(tokens, sees_layers=self.sees_layers)
        self._tokens = tokens
        self._allowance_s = max(allowance_s, UNKNOWN_S) if is_cold else allowance_s

    def tick(self) -> None:
        """A layer of the step is done."""
        self._count += 1

    def end(self, now: float, *, computed: bool, has_work: bool) -> None:
        """The step is over; `computed` says that it was one for some request."""
        self._has_work = has_work
        self._allowance_s = 0.0
        if computed:
            self._steps += 1
            self._count += 1
            self._bounds.observe(self._tokens, now - self._began)

    def stamp(self, load: WorkerLoad, *, has_more: bool) -> WorkerLoad:
        """`load` with the progress as it is now; `has_more` for work that no step has seen yet."""
        return replace(
            load,
            progress=self._count,
            has_work=self._has_work or has_more,
            step_allowance_s=self._allowance_s,
        )
