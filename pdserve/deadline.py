"""Deadlines as points on the running event loop's clock; only the remaining time is sent."""

from __future__ import annotations

import asyncio


def after(seconds: float | None) -> float | None:
    """Return the deadline `seconds` from now, or None for none."""
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


def remaining(deadline: float | None) -> float | None:
    """Return the seconds left, never negative, or None if there is no deadline."""
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
