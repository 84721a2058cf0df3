"""Time in tests: how long to wait for what must happen, and how not to wait for a deadline."""

from __future__ import annotations

import asyncio

# For a machine that is ten times slower than a developer's, and busy. Nothing is slower because of
# it; a test that fails takes longer.
WAIT_S = 120.0
# The same for a process that loads vLLM and a model.
START_S = 600.0
# After so long, a test that may load several of them hangs.
HUNG_S = 3 * START_S


def skip(seconds: float) -> None:
    """The timers of the running loop see so much time pass at once: a test can let a deadline pass
    when it has come to where it wants to be, in place of racing with it."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
