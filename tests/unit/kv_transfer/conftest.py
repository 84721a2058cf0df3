"""Fixtures: workers for each transport, and a check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kv_pair import TRANSPORTS, KvWorkers, open_files, own_threads, tls_files
from tests.support.pki import Ca
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


@pytest.fixture(scope="session")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of workers that encrypt KV."""
    return {"tls": True, **tls_files(Ca(tmp_path_factory.mktemp("pki")))}


@pytest.fixture(params=[*TRANSPORTS, "tls"])
def kv_workers(
    request: pytest.FixtureRequest, encrypted: dict[str, Any], clean: None
) -> Iterator[KvWorkers]:
    """Yield a factory of workers for each transport in turn, and for encrypted TCP."""
    is_tls = request.param == "tls"
    made = KvWorkers(TRANSPORTS["tcp" if is_tls else request.param], **encrypted if is_tls else {})
    yield made
    made.close()


@pytest.fixture
def tls_workers(encrypted: dict[str, Any], clean: None) -> Iterator[KvWorkers]:
    made = KvWorkers(TRANSPORTS["tcp"], **encrypted)
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
