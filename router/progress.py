"""Whether a worker with work gets on, from what it says of itself. Pure; the clock is the caller's,
and must stand still while nobody listens (`router/attention.py`).

A worker with open streams says something at least every half second. One that says nothing hangs,
or its machine or network does; one that speaks, has work, and whose count of progress stands still
for longer than it says that its step may take has an engine that hangs, however well its RPCs
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.types import WorkerLoad


@dataclass(slots=True)
class ProgressWatch:
    """State: what was last seen to change, and when; `is_doubted` is its owner's: a member that is
    left in although it does not get on."""

    frames: int = -1
    heard_at: float = 0.0
    progress: int = -1
    got_on_at: float = 0.0
    is_doubted: bool = False

    def look(
        self, now: float, *, frames: int, streams: int, load: WorkerLoad | None, stall_s: float
    ) -> str:
        """Why the worker is out, or "". `frames` counts what it has said over its stream, `streams`
        are open there. To be asked several times in `stall_s`; 0 turns it off."""
        if frames != self.frames or not streams:
            self.frames, self.heard_at = frames, now
        progress = self.progress if load is None else load.progress
        if progress != self.progress or load is None or not load.has_work or not streams:
            self.progress, self.got_on_at = progress, now
        if not stall_s:
            return ""
        if now - self.heard_at >= stall_s:
            return f"it has said nothing for {now - self.heard_at:.1f} s"
        allowed_s = stall_s if load is None else max(stall_s, load.step_allowance_s)
        if now - self.got_on_at >= allowed_s:
            return f"it has work and has made no step for {now - self.got_on_at:.1f} s"
        return ""
