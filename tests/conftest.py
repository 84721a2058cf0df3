"""What holds for every test: a loop that a test leaves has no task of its making in it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder."""

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(TESTS).parts[0]

    for item in items:
        if folder(item) in ("slow", "e2e"):
            item.add_marker(pytest.mark.timeout(HUNG_S))
        if folder(item) == "slow":
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: _FOLDERS.index(folder(item)))


class _ByFile(LoadScopeScheduling):
    """Gives each file to one process, and the whole of e2e, whose tests share engines. (Groups of
    pytest-xdist 3.8 have no effect with pytest 9.2, which keeps node ids elsewhere.)"""

    def _split_scope(self, nodeid: str) -> str:
        return "e2e" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


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
