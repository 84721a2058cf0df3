"""What holds for every test: a loop that a test leaves has no task of its making in it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import WAIT_S

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


# Folders whose tests take long. They start first, so that all processes end together.
_LONGEST_FIRST = ("slow", "soak", "vllm", "e2e", "integration")
_SLOW_FOLDERS = ("slow", "soak")
# Fixtures of session scope that start engines. Tests which use them run in one process.
_SHARED_ENGINES = {"aggregated", "prefill", "pair_shm", "pair_tcp"}


def _group(item: pytest.Item) -> str | None:
    """Return the xdist group of a test, or None if any process may run it."""
    folder = item.path.relative_to(TESTS).parts[0]
    if folder == "unit":
        return None
    is_shared = _SHARED_ENGINES & set(getattr(item, "fixturenames", ()))
    is_slow = item.get_closest_marker("slow") is not None
    # All quick tests on real vLLM use one process: it imports vLLM once and forks the engines.
    return "engines" if is_shared or (folder == "vllm" and not is_slow) else item.path.stem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and group those that share a fixture that starts processes."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        return [*_LONGEST_FIRST, folder].index(folder)

    for item in items:
        if item.path.relative_to(TESTS).parts[0] in _SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=place)


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
