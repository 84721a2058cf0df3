"""Deadlines as times on the running event loop's clock. Processes send each other the remaining
time, because their clocks differ."""

from __future__ import annotations

import asyncio


def after(seconds: float | None) -> float | None:
    """Return the deadline `seconds` from now, or None if `seconds` is None."""
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


def remaining(deadline: float | None) -> float | None:
    """Return the seconds left, never negative, or None if there is no deadline."""
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
