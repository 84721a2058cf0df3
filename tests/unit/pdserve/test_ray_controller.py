"""The controller on Ray, without Ray."""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_RAY = ("ray", "ray.experimental.internal_kv", "ray.util.scheduling_strategies")
_OURS = tuple(f"pdserve.deploy.ray.{name}" for name in ("controller", "host"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported with a Ray that only has its error."""
    for name in _RAY:
        monkeypatch.setitem(sys.modules, name, MagicMock())  # type: ignore[misc]
    sys.modules["ray"].exceptions.RayError = OSError
    others = {name: sys.modules.pop(name) for name in _OURS if name in sys.modules}
    yield importlib.import_module(_OURS[0])
    for name in _OURS:
        sys.modules.pop(name, None)
    sys.modules.update(others)


async def test_a_credential_that_cannot_be_read_does_not_end_the_reconciliation(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    again = asyncio.Event()

    async def look() -> str:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ConfigError("the token cannot be read", field="worker.access")
        again.set()
        return await asyncio.Future[str]()

    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    controller: Any = module.Controller.__new__(module.Controller)
    monkeypatch.setattr(controller, "_look", look)
    running, waiting = asyncio.create_task(controller._run()), asyncio.create_task(again.wait())
    try:
        done, _ = await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiting}
        assert controller._failure == "ConfigError: the token cannot be read"
    finally:
        for task in (running, waiting):
            task.cancel()


async def test_down_may_take_as_long_as_the_processes_drain(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers first, then their workers. One whose host is gone does not answer."""

    async def answer(reference: Any) -> float:
        if isinstance(reference, OSError):
            raise reference
        return float(reference)

    monkeypatch.setattr(module, "_answer", answer)
    controller: Any = module.Controller.__new__(module.Controller)
    controller._hosts = {}
    for name, grace in (("router-0", 20.0), ("decode-0", 3600.0), ("decode-1", OSError("gone"))):
        controller._hosts[name] = host = MagicMock()
        host.grace.remote.return_value = grace
    assert await controller.down_s() > 3600.0 + 20.0
