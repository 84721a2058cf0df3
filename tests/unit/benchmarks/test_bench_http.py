"""Replay over HTTP against an endpoint in this process."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from fake_openai import RECEIPT, FakeOpenAI

from benchmarks.errors import BenchError, WarmupFailed
from benchmarks.run import ReplaySettings, run_replay
from benchmarks.targets import HttpTarget, base_url
from benchmarks.trace import Trace, TraceMeta, TraceRequest, write_trace
from benchmarks.workload import Shape
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.records import Status, Timeline
    from benchmarks.result import ReplayResult

ROWS = (
    TraceRequest(0.0, 7, 3, (0, 1)),
    TraceRequest(0.0, 9, 1, (0, 2, 3)),
    TraceRequest(1.0, 8, 2, (0, 1)),
    TraceRequest(2.0, 30, 9, tuple(range(10, 18))),
)


class Quiet:
    """An observer that keeps the counts alone."""

    def __init__(self) -> None:
        self.ends: list[Status] = []
        self.requests = 0

    def prepared(self, workload: Any, _model: Any) -> None:
        self.requests = workload.cut.requests

    def sent(self) -> None:
        return None

    def finished(self, status: Status) -> None:
        self.ends.append(status)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_trace(Trace(TraceMeta(name="t", block_size=4), ROWS), tmp_path / "t.jsonl")
    return str(tmp_path / "t.jsonl")


async def _run(server: FakeOpenAI, settings: ReplaySettings) -> ReplayResult:
    target = HttpTarget(server.url)
    try:
        return await run_replay(settings, target, Quiet())
    finally:
        await target.aclose()


async def test_every_request_asks_for_exactly_its_tokens(trace: str) -> None:
    async with FakeOpenAI().serve() as server:
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6, warmup=0))
    assert [record.status for record in result.records] == ["ok"] * 4
    by_id = dict(zip(server.request_ids, server.bodies, strict=True))
    for record, row in zip(result.records, ROWS, strict=True):
        body = by_id[record.request_id]
        assert len(body.pop("prompt")) == row.input_tokens == record.prompt_tokens
        assert body == {
            "model": "demo",
            "max_tokens": row.output_tokens,
            "min_tokens": row.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert record.completion_tokens == sum(record.chunk_tokens or ()) == row.output_tokens
        times = [record.scheduled_s, record.sent_s, *record.chunk_s, record.end_s]
        assert times == sorted(times)  # type: ignore[type-var]


async def test_prompts_on_the_wire_share_the_trace_s_prefixes(trace: str) -> None:
    async with FakeOpenAI().serve() as server:
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6, warmup=0))
    prompts = dict(zip(server.request_ids, (b["prompt"] for b in server.bodies), strict=True))
    one, other, longer, apart = (prompts[record.request_id] for record in result.records)
    assert one[:4] == other[:4]
    assert one[4] != other[4]
    assert longer[:7] == one
    assert apart[0] != one[0]


async def test_receipts_are_kept_and_summed_up(trace: str) -> None:
    async with FakeOpenAI().serve() as server:
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6))
    assert {tuple(record.receipt or ()) for record in result.records} == {tuple(RECEIPT)}
    receipts = result.summary().receipts
    assert receipts is not None
    assert receipts.totals["transfer_bytes"] == 4 * 4096
    assert receipts.fallbacks == {}


async def test_all_are_in_flight_at_once_when_none_is_answered(trace: str) -> None:
    async with FakeOpenAI(hold_until_running=len(ROWS)).serve() as server:
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6, warmup=0))
    assert result.summary().ok == 4
    assert max(record.sent_s or 0.0 for record in result.records) <= min(
        record.chunk_s[0] for record in result.records
    )


async def test_warm_up_goes_first_alone_and_shares_no_prefix(trace: str) -> None:
    async with FakeOpenAI().serve() as server:
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6, warmup=2))
    assert server.request_ids[:2] == ["bench-0-warmup-0", "bench-0-warmup-1"]
    assert [record.status for record in result.warmup] == ["ok", "ok"]
    assert len(result.records) == result.summary().requests == 4
    firsts = {body["prompt"][0] for body in server.bodies[:2]}
    assert firsts.isdisjoint(body["prompt"][0] for body in server.bodies[2:])


FAULTS = [
    pytest.param("refuse", "HTTP 429: full", id="refused"),
    pytest.param("break", "connection failed", id="broken off"),
    pytest.param("short", "wrong length", id="too short"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
async def test_a_fault_fails_its_request_alone(trace: str, fault: str, message: str) -> None:
    server = FakeOpenAI(fault=lambda number: fault if number == 1 else None)
    async with server.serve():
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6))
    failed = [record for record in result.records if record.status == "failed"]
    assert len(failed) == 1
    assert message in (failed[0].error or "")
    assert result.summary().ok == 3


class WatchedTarget(HttpTarget):
    """Keeps the timeline of the request that it sent last."""

    timeline: Timeline

    async def send(self, prepared: Any, timeline: Timeline) -> None:
        self.timeline = timeline
        await super().send(prepared, timeline)


class DrainClock:
    """Whatever lies ahead is there when the target's request has its first chunk."""

    def __init__(self, target: WatchedTarget) -> None:
        self._target = target

    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, when_s: float) -> None:
        async with asyncio.timeout(WAIT_S):
            while when_s > self.now() and not self._target.timeline.chunk_s:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_hanging_request_is_broken_off_after_the_drain(trace: str) -> None:
    async with FakeOpenAI(fault=lambda _number: "hang").serve() as server:
        settings = ReplaySettings(trace=trace, shape=Shape(limit=1), warmup=0)
        target = WatchedTarget(server.url)
        async with aclosing(target):
            result = await run_replay(settings, target, Quiet(), DrainClock(target))
        await asyncio.wait_for(server.client_left.wait(), WAIT_S)
    (record,) = result.records
    assert (record.status, len(record.chunk_s), server.running) == ("timed_out", 1, 0)


async def test_a_failing_warm_up_ends_the_run(trace: str) -> None:
    async with FakeOpenAI(fault=lambda _number: "refuse").serve() as server:
        with pytest.raises(WarmupFailed, match="HTTP 429: full"):
            await _run(server, ReplaySettings(trace=trace))
    assert len(server.bodies) == 1


async def test_rows_over_the_model_s_limit_are_dropped(trace: str) -> None:
    async with FakeOpenAI().serve() as server:
        server.models[0]["max_model_len"] = 10
        result = await _run(server, ReplaySettings(trace=trace, speedup=1e6, warmup=0))
        assert [record.index for record in result.records] == [0, 1, 2]
        assert result.workload["dropped"] == 1
        shape = Shape(max_total_tokens=9_999)
        again = await _run(server, ReplaySettings(trace=trace, shape=shape, speedup=1e6))
        assert again.workload["dropped"] == 1


MODELS = [
    pytest.param([], None, "served: none", id="none"),
    pytest.param([{"id": "a"}, {"id": "b"}], None, "--model; served: a, b", id="two"),
    pytest.param([{"id": "a"}], "b", "'b' is not served there; served: a", id="another"),
    pytest.param([{"id": "a"}], None, "--vocab-size", id="unknown vocabulary"),
    pytest.param([{"id": "a", "vocab_size": True}], None, "--vocab-size", id="bad vocabulary"),
]


@pytest.mark.parametrize(("models", "name", "message"), MODELS)
async def test_an_endpoint_that_does_not_fit_is_refused(
    trace: str, models: list[dict[str, Any]], name: str | None, message: str
) -> None:
    async with FakeOpenAI(models=models).serve() as server:
        with pytest.raises(BenchError, match=message):
            await _run(server, ReplaySettings(trace=trace, model=name))
    assert server.bodies == []


async def test_an_endpoint_that_is_not_there_is_refused(trace: str) -> None:
    async with FakeOpenAI().serve() as server:
        pass
    with pytest.raises(BenchError, match="is the server running there"):
        await _run(server, ReplaySettings(trace=trace))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("https://h/v1/", "https://h"),
        ("http://h/a/v1", "http://h/a"),
    ],
)
def test_a_url_may_have_the_version_in_it(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h", "http://", "http://h/?a=1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="--url"):
        base_url(url)
