"""What holds for every test: a loop that a test leaves has no task of its making in it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import HUNG_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TESTS = Path(__file__).parent
# How long an example takes says more of the machine than of the code. Every run tries the same
# examples; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("deep", settings.get_profile("explore"), derandomize=True, database=None)
settings.register_profile(
    "quick", settings.get_profile("deep"), max_examples=25, stateful_step_count=25
)
settings.load_profile("quick")

# Programs that are sent Ctrl-C inherit that it is ignored, as a shell has it for what it starts in
# the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


pytest_plugins = ["tests.e2e.fixtures"]
# The folder of a test is its tier. Those that take longest start first, so that all processes end
# together.
_FOLDERS = ("slow", "e2e", "integration", "gpu", "unit")
# Fixtures of session scope that start engines. Tests which use them run in one process.
_SHARED_ENGINES = {"aggregated", "prefill", "pair_shm", "pair_tcp"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and group those that share processes into one xdist worker."""

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(TESTS).parts[0]

    for item in items:
        # All of e2e is one group: it imports vLLM once and forks the engines.
        is_shared = folder(item) == "e2e" or _SHARED_ENGINES & set(
            getattr(item, "fixturenames", ())
        )
        if folder(item) in ("slow", "e2e"):
            item.add_marker(pytest.mark.timeout(HUNG_S))
        if folder(item) == "slow":
            item.add_marker(pytest.mark.slow)
        if folder(item) != "unit":
            item.add_marker(pytest.mark.xdist_group("engines" if is_shared else item.path.stem))
    items.sort(key=lambda item: _FOLDERS.index(folder(item)))


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Set up before every other fixture of a test, so that it looks after they cleaned up."""
    before = asyncio.all_tasks()
    yield
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    if leaked:
        # gRPC ends its own tasks a moment after `stop` has returned.
        _, leaked = await asyncio.wait(leaked, timeout=WAIT_S)
    assert not leaked, f"still running: {', '.join(sorted(map(repr, leaked)))}"
