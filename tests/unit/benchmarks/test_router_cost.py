"""The router benchmark's own parts: its mock worker and client agree on every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks.errors import BenchError
from benchmarks.router import arms, load
from benchmarks.router.__main__ import measure

if TYPE_CHECKING:
    from pathlib import Path


async def test_every_token_is_counted_and_dated(tmp_path: Path) -> None:
    async with arms.running(arms.DIRECT, tmp_path, 0.001, 4) as router:
        heard = await load.drive(router.address, router.model, streams=4, tokens=9, requests=3)
        worker = router.pid
        assert heard.failures == []
        assert heard.tokens == len(heard.latencies_s) == 4 * 9 * 3
        assert min(heard.latencies_s) > 0
    assert not psutil.pid_exists(worker)


async def test_a_refused_request_is_a_failure_and_not_waited_for(tmp_path: Path) -> None:
    async with arms.running(arms.OURS, tmp_path, 0.001, 4) as router:
        heard = await load.drive(router.address, "unknown", streams=2, tokens=1)
        assert len(heard.failures) == 2
        assert "404" in heard.failures[0]


@pytest.mark.parametrize("name", [arms.DIRECT, arms.OURS, arms.TRACED])
async def test_a_round_gives_all_figures(name: str) -> None:
    sample = await measure(name, 4, 0.01)
    assert (sample.router, sample.streams) == (name, 4)
    assert sample.p99_ms >= sample.p50_ms > 0
    assert sample.requests_per_s > 0


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "pip install" in (arms.missing("smg") or "")
    assert arms.missing(arms.OURS) is None


async def test_what_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="did not start"):
        async with arms.running(arms.DIRECT, tmp_path, 0.001, 4):
            pass
