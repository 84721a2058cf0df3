"""Warm workers of `pdserve up` that are to take requests before they have loaded their model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.deploy.local import supervisor as module
from pdserve.deploy.local.launcher import Launcher
from pdserve.deploy.local.plan import ServicePlan
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess
from pdserve.deploy.local.supervisor import OK, Supervisor
from pdserve.net.rpc import Dialer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


class Process:
    """A process that ends with the first signal."""

    pid = 1

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def child(tmp_path: Path) -> SupervisedProcess:
    made = SupervisedProcess("decode-1", tmp_path / "log", Restarts(1.0), warm=True)
    made.wanted.set()
    return made


@pytest.fixture
def supervisor(
    tmp_path: Path, child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """One that serves with nothing but `child`, and notes what it tells."""
    made: Any = Supervisor.__new__(Supervisor)
    told: list[str] = []
    made._display = SimpleNamespace(tell=told.append, died=lambda *_: told.append("died"))
    made.told = told
    made._plan, made._groups = ServicePlan({}, {}, [], [], Dialer()), {}
    made._children = {child.name: child}
    made._run_dir, made._launcher = tmp_path, Launcher(None)
    made._is_serving, made._is_stopping = True, False
    monkeypatch.setattr(made, "_config_of", lambda _: {})
    yield made
    made._launcher.close()


async def test_a_worker_that_is_to_begin_anew_while_it_loads_has_not_died(
    supervisor: Any, child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    async def run(_: SupervisedProcess) -> int:
        nonlocal runs
        runs += 1
        supervisor._is_stopping = runs == 2
        child.begin_anew()
        return -signal.SIGTERM  # before it could handle the signal

    monkeypatch.setattr(supervisor, "_run", run)
    assert await supervisor._keep(child) == OK
    assert (supervisor.told, child.restarts.deaths) == (["decode-1 has ended and is restarted"], 0)


@pytest.mark.parametrize("change", ["takes requests", "leaves", "none"])
async def test_a_change_while_a_process_is_being_started_reaches_it(
    supervisor: Any, child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    process = Process()

    @contextlib.asynccontextmanager
    async def launched(
        *_: object, **_options: object
    ) -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
        child.warm = change != "takes requests"
        if change == "leaves":
            child.wanted.clear()
        reports = asyncio.StreamReader()
        reports.feed_eof()
        yield process, reports

    async def until_ended(*_: object) -> int:
        return OK

    monkeypatch.setattr(supervisor._launcher, "launched", launched)
    monkeypatch.setattr(module, "until_ended", until_ended)
    assert await supervisor._run_process(child) == OK
    assert process.signals == ([] if change == "none" else [signal.SIGTERM])
