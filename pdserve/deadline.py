"""A deadline is a point on the monotonic clock, made once where a request enters; only the time
remaining travels onward."""

from __future__ import annotations

import asyncio
import time


def after(seconds: float | None) -> float | None:
    """The deadline `seconds` from now, or None for none."""
    return None if seconds is None else time.monotonic() + seconds


def remaining(deadline: float | None, *, at_most: float | None = None) -> float | None:
    """Seconds left, never negative, capped at `at_most`; None where there is no bound at all."""
    if deadline is None:
        return at_most
    left = max(0.0, deadline - time.monotonic())
    return left if at_most is None else min(left, at_most)


def timeout(deadline: float | None, *, at_most: float | None = None) -> asyncio.Timeout:
    """A context that raises TimeoutError when the deadline or the cap is reached."""
    return asyncio.timeout(remaining(deadline, at_most=at_most))
