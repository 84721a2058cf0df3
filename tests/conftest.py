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
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("suite")

# Programs that are sent Ctrl-C inherit that it is ignored, as a shell has it for what it starts in
# the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# In order of how long a file of theirs may take.
_LONGEST_FIRST = ("vllm", "integration", "soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the files out, the long ones come first, so that all end together."""

    def place(item: pytest.Item) -> int:
        directory = item.path.relative_to(TESTS).parts[0]
        return [*_LONGEST_FIRST, directory].index(directory)

    if hasattr(config, "workerinput"):
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
