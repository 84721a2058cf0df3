"""Fixtures: a rig for each transport, and the check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.transport.loopback import LoopbackTransport
from tests.patience import WAIT_S
from tests.unit.kv_transfer.rig import Rig, by_name, open_files, own_threads


@pytest.fixture
def loopback() -> LoopbackTransport:
    """The instance that a rig over loopback uses."""
    return LoopbackTransport()


@pytest.fixture
def clean() -> Iterator[None]:
    """No thread of the KV plane and no descriptor outlives the test."""
    gc.collect()
    before = open_files()
    assert not own_threads()
    yield
    end = time.monotonic() + WAIT_S
    while own_threads() or open_files() > before:
        gc.collect()
        assert time.monotonic() < end, (own_threads(), open_files(), before)


RigOf = Callable[[str], Rig]


@pytest.fixture
def rig_of(loopback: LoopbackTransport, clean: None) -> Iterator[RigOf]:
    """Makes a rig for the transport that a test names."""
    made: list[Rig] = []

    def make(name: str) -> Rig:
        made.append(Rig(by_name(name, loopback)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["loopback", "shm", "tcp"])
def rig(request: pytest.FixtureRequest, loopback: LoopbackTransport, clean: None) -> Iterator[Rig]:
    """Workers that exchange KV over each transport in turn."""
    made = Rig(by_name(request.param, loopback))
    yield made
    made.close()


@pytest.fixture
def tcp_rig(loopback: LoopbackTransport, clean: None) -> Iterator[Rig]:
    """Workers over tcp, for what happens on the wire."""
    made = Rig(by_name("tcp", loopback))
    yield made
    made.close()


@pytest.fixture
def loopback_rig(loopback: LoopbackTransport, clean: None) -> Iterator[Rig]:
    """Workers over loopback, whose pushes a test can hold, break and damage."""
    made = Rig(by_name("loopback", loopback))
    yield made
    made.close()
