"""Pauses between consecutive failed attempts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def backoff(first_s: float, longest_s: float, *, jitter: bool = False) -> Iterator[float]:
    """Yield pauses in seconds without end: `first_s`, then twice the last, at most `longest_s`.

    `jitter` shortens each by up to half, so that many callers do not return to a peer at the same
    moment. Use a new iterator after a success.
    """
    pause_s = first_s
    while True:
        yield pause_s * random.uniform(0.5, 1.0) if jitter else pause_s
        pause_s = min(2 * pause_s, longest_s)
