"""Settings and fixtures of all tests. No test may leave a task on its event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
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
_constants_of_modules = providers._get_local_constants


def _constants() -> providers.Constants:
    """Return no constants of modules where every run is to try the same examples. Hypothesis draws
    from the constants in all modules that are loaded, and these depend on the tests before."""
    return providers.Constants() if settings.default.derandomize else _constants_of_modules()


providers._get_local_constants = _constants

# A shell makes programs that it starts in the background ignore SIGINT. Undo this, because child
# processes inherit it and tests send them Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


pytest_plugins = ["tests.support.engine_fixtures", "tests.support.served_demo"]
# The folder of a test is its tier. The slowest tiers start first, and of a tier the longest files,
# so that all processes of a run end at about the same time.
_FOLDERS = ("slow", "e2e", "integration", "gpu", "unit")
_LONGEST = (
    *("test_ray", "test_models", "test_gpu_shim", "test_speculation", "test_handoff_explored"),
    *("test_handoff_exact", "test_pdserve_serve", "test_adapters"),
)
# Files whose tests share nothing: any process may take the next one.
_SPLIT = ("tests/slow/test_models.py", "tests/slow/test_handoff_explored.py")
# Files that share engines of the whole run, so that one process takes all of each group.
_PAIR = ("aggregated", "engine_promises", "grammar_guard", "handoff_exact", "handoff_release")
_SERVED = ("embeddings", "pdserve_serve", "tools_served")
_TOGETHER = {f"tests/e2e/test_{name}.py": "pair" for name in _PAIR} | {
    f"tests/e2e/test_{name}.py": "served demo" for name in _SERVED
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test of a tier that `-m "not slow and not gpu"` leaves out, and none that
    `-m "slow or hypothesis"` does: every process would import vLLM for them."""
    if config.option.markexpr == "slow or hypothesis" and collection_path.suffix == ".py":
        is_slow = TESTS / "slow" in collection_path.parents
        uses_it = is_slow or "hypothesis" in collection_path.read_text("utf-8")
        return None if uses_it or collection_path.name == "conftest.py" else True
    terms = config.option.markexpr.split(" and ")
    left_out = {TESTS / x.removeprefix("not ") for x in terms if x.startswith("not ")}
    return True if collection_path in left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and put them into the order in which they start."""

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(TESTS).parts[0]

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.stem
        return (
            _FOLDERS.index(folder(item)),
            _LONGEST.index(name) if name in _LONGEST else len(_LONGEST),
        )

    for item in items:
        if folder(item) in ("slow", "e2e"):
            item.add_marker(pytest.mark.timeout(HUNG_S))
        if folder(item) == "slow":
            item.add_marker(pytest.mark.slow)
    items.sort(key=place)


class _ByFile(LoadScopeScheduling):
    """Assigns each file to one process, each test of `_SPLIT` to any, and files of `_TOGETHER` to
    the same. Groups of pytest-xdist 3.8 have no effect with pytest 9.2, which stores node ids
    elsewhere."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file in _SPLIT else _TOGETHER.get(file, file)


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
