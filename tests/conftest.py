"""Settings and fixtures of all tests. No test may leave a task on its event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.timeouts import HUNG_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TESTS = Path(__file__).parent
# No deadline, because the duration of an example depends mostly on the machine. Every run tries the
# same examples; `--hypothesis-profile=explore` tries new ones.
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("deep", settings.get_profile("explore"), derandomize=True, database=None)
settings.register_profile(
    "quick", settings.get_profile("deep"), max_examples=25, stateful_step_count=25
)
settings.load_profile("quick")

# A shell makes programs that it starts in the background ignore SIGINT. Undo this, because child
# processes inherit it and tests send them Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


pytest_plugins = ["tests.support.engine_fixtures", "tests.support.served_demo"]
# The folder of a test is its tier. The slowest tiers start first, so that all processes of a run
# end at about the same time.
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
    """Assigns each file to one process, and all of e2e to one process, because its tests share
    engines. Groups of pytest-xdist 3.8 have no effect with pytest 9.2, which stores node ids
    elsewhere."""

    def _split_scope(self, nodeid: str) -> str:
        return "e2e" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def exempt_modules_from_garbage_collection() -> None:
    """Imported modules are millions of objects, and tests collect garbage hundreds of times. Once a
    file, because tests import more, and what they test may end the exemption."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Assert that a test leaves no task. Set up before all other fixtures, so that its check runs
    after their cleanup."""
    before = asyncio.all_tasks()
    yield
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    if leaked:
        # gRPC ends its own tasks shortly after `stop` has returned.
        _, leaked = await asyncio.wait(leaked, timeout=WAIT_S)
    assert not leaked, f"still running: {', '.join(sorted(map(repr, leaked)))}"
