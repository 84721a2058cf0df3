"""The step thread of the engine on vLLM, with a core that does nothing."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.errors import Unavailable
from pdserve.types import KvLedger
from workers.vllm import engine as engine_module
from workers.vllm.engine import VllmEngine
from workers.vllm.step.inbox import StepInbox

if TYPE_CHECKING:
    from kv_transfer.protocol.snapshot import KvSnapshot
    from workers.engine import EngineInfo


class IdleCore:
    """A core without work, whose group fails if it leaves it."""

    info = SimpleNamespace(kv=object())
    streams = SimpleNamespace(open_ids=())
    wakeups = ()

    def __init__(self, *_: object) -> None:
        self.looks = 0
        self.is_closed = False

    def kv_look(self) -> None: ...

    def kv_ranks(self) -> tuple[KvSnapshot, ...]:
        self.looks += 1
        return ()

    def ledger(self) -> KvLedger:
        return KvLedger()

    def leave_group(self, _limit_s: float) -> None:
        raise RuntimeError("connection closed by peer")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setattr(engine_module, "apply_environment", lambda _: None)
    monkeypatch.setitem(sys.modules, "workers.vllm.core", SimpleNamespace(VllmCore=IdleCore))  # type: ignore[misc]
    return VllmEngine(cast("Any", SimpleNamespace(group=SimpleNamespace(leave_s=0.0))))


async def test_an_engine_closes_also_if_its_group_fails_while_it_leaves(engine: VllmEngine) -> None:
    engine._loop, engine._closing = asyncio.get_running_loop(), True
    started: Future[EngineInfo] = Future()
    engine._run(started)
    core = cast("Any", engine._core)
    assert core.is_closed


async def test_ranks_are_looked_at_again_also_if_the_thread_answers_at_once(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = cast("Any", IdleCore())
    engine._core = core
    monkeypatch.setattr(engine._sleep, "wake", lambda: engine._inbox.take(core))
    engine.kv_state()
    engine.kv_state()
    assert core.looks == 2


def test_an_inbox_that_stopped_takes_nothing_and_names_streams_that_did_not_start() -> None:
    ran, woken = list[str](), list[bool]()
    inbox = StepInbox(cast("Any", SimpleNamespace(wake=lambda: woken.append(True))))
    assert inbox.put(lambda _: ran.append("action")) is None
    assert inbox.take(cast("Any", None)) == []
    assert (ran, woken, bool(inbox)) == (["action"], [True], False)
    assert inbox.put(lambda _: ran.append("late"), 7) is None
    end = Unavailable("the worker is closing")
    assert inbox.stop(end) == [7]
    assert inbox.put(lambda _: ran.append("later"), 8) is end
    assert inbox.take(cast("Any", None)) == []
    assert ran == ["action"]
