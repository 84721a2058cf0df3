"""Fixtures: workers for each transport, and a check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.kv_pair import TRANSPORTS, KvWorkers, open_files, own_threads
from tests.support.timeouts import WAIT_S

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
def kv_workers(request: pytest.FixtureRequest, clean: None) -> Iterator[KvWorkers]:
    """Yield a factory of workers for each transport in turn."""
    made = KvWorkers(TRANSPORTS[request.param])
    yield made
    made.close()


@pytest.fixture
def tcp_workers(clean: None) -> Iterator[KvWorkers]:
    made = KvWorkers(TRANSPORTS["tcp"])
    yield made
    made.close()


@pytest.fixture
def shm_rig(clean: None) -> Iterator[KvWorkers]:
    made = KvWorkers(TRANSPORTS["shm"])
    yield made
    made.close()
