"""Fixtures: a rig for each transport, and the check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import pytest

from tests.patience import WAIT_S
from tests.unit.kv_transfer.rig import TRANSPORTS, Rig, open_files, own_threads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def clean() -> Iterator[None]:
    """Check that no KV thread and no descriptor outlives the test."""
    gc.collect()
    before = open_files()
    assert not own_threads()
    yield
    end = time.monotonic() + WAIT_S
    while own_threads() or open_files() > before:
        gc.collect()
        assert time.monotonic() < end, (own_threads(), open_files(), before)


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest, clean: None) -> Iterator[Rig]:
    """Workers that exchange KV over each transport in turn."""
    made = Rig(TRANSPORTS[request.param])
    yield made
    made.close()


@pytest.fixture
def tcp_rig(clean: None) -> Iterator[Rig]:
    made = Rig(TRANSPORTS["tcp"])
    yield made
    made.close()


@pytest.fixture
def shm_rig(clean: None) -> Iterator[Rig]:
    made = Rig(TRANSPORTS["shm"])
    yield made
    made.close()
