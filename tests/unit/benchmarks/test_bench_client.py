"""The streaming clients and a replay through them, against an endpoint that does as it is told."""

from __future__ import annotations

import asyncio
import json
import math
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.client import GrpcTarget, HttpTarget, Piece, read_stream
from benchmarks.errors import BenchError, TargetError
from benchmarks.metrics import RequestTimeline
from benchmarks.progress import Progress
from benchmarks.replay import ReplayResult, ReplaySettings, parse, run_replay
from benchmarks.workload import Shape
from tests.support.fake_openai import FakeOpenAI
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


def data(*events: object) -> bytes:
    texts = [x if isinstance(x, str) else json.dumps(x) for x in events]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


async def blocks(raw: bytes, sizes: Sequence[int] = ()) -> AsyncIterator[bytes]:
    for size in sizes or (len(raw),):
        yield raw[:size]
        raw = raw[size:]
    yield raw


async def pieces(raw: bytes, sizes: Sequence[int] = ()) -> list[Piece]:
    return [piece async for piece in read_stream(blocks(raw, sizes))]


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


async def test_events_cut_anywhere_are_read_alike() -> None:
    choice = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [5, 6]}
    last = {"choices": [], "usage": USAGE, "pdserve": {"receipt": {"transfer_bytes": 1}}}
    raw = data({"choices": [choice]}, last, "[DONE]")
    whole = await pieces(raw)
    assert whole[0] == Piece(tokens=2, token_ids=(5, 6), text="a")
    assert whole[1].usage == USAGE | {"cached_tokens": None}
    assert whole[1].receipt == {"transfer_bytes": 1}
    for size in (1, 7, 20):
        assert await pieces(raw, [size] * (len(raw) // size)) == whole


async def test_running_usage_gives_the_tokens_of_each_piece() -> None:
    events = [
        {"choices": [{"index": 0, "text": "x"}], "usage": {"completion_tokens": n}}
        for n in (1, 4, 4)
    ]
    assert [x.tokens for x in await pieces(data(*events, "[DONE]"))] == [1, 3, 0]


@pytest.mark.parametrize(
    ("raw", "message", "code"),
    [
        (data({"choices": []}), r"ended before \[DONE\]", ""),
        (data({"error": {"message": "lost", "code": "worker_failed"}}), "lost", "worker_failed"),
        (data("{nope"), "not JSON", ""),
    ],
)
async def test_a_broken_stream_is_an_error(raw: bytes, message: str, code: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        await pieces(raw)
    assert caught.value.code == code


def timeline(output_tokens: int = 2) -> RequestTimeline:
    return RequestTimeline(
        index=0, request_id="r", input_tokens=3, output_tokens=output_tokens, scheduled_s=0.0
    )


def test_a_last_piece_without_text_holds_no_token() -> None:
    line = timeline(2)
    for at_s, text in ((1.0, "x"), (2.0, "y"), (3.0, "")):
        line.add(Piece(text=text), at_s)
    line.add(Piece(has_choice=False, usage={"completion_tokens": 2}), 3.0)
    line.complete(3.0)
    assert (line.chunk_s, line.chunk_tokens) == ([1.0, 2.0], [1, 1])


def test_an_answer_of_another_length_is_a_failure() -> None:
    line = timeline()
    line.add(Piece(tokens=1, usage={"completion_tokens": 1}), 1.0)
    with pytest.raises(TargetError, match="1 tokens instead of 2"):
        line.complete(2.0)
    with pytest.raises(TargetError, match="no usage"):
        timeline().complete(2.0)


async def replayed(server: FakeOpenAI, **settings: Any) -> ReplayResult:
    values: dict[str, Any] = {
        "trace": "chat",
        "shape": Shape(scale_lengths=Fraction(1, 32), limit=6),
        "speedup": 1000.0,
        "drain_timeout_s": 60.0,
    }
    target = HttpTarget(server.url)
    try:
        return await run_replay(ReplaySettings(**(values | settings)), target, Progress())
    finally:
        await target.aclose()


async def test_a_replay_records_each_request_and_survives_its_file() -> None:
    async with FakeOpenAI().serve() as server:
        result = await replayed(server, warmup=2, slo_s={"ttft": 60.0})
        assert len(server.bodies) == 8
    assert [r.status for r in result.records] == ["ok"] * 6
    bodies = dict(zip(server.request_ids, server.bodies, strict=True))
    for record in result.records:
        body = bodies[record.request_id]
        assert len(body["prompt"]) == record.input_tokens == record.prompt_tokens
        assert body["min_tokens"] == body["max_tokens"] == record.output_tokens
        assert record.receipt is not None
    assert result.trace["format"] == "azure"
    whole = json.loads(json.dumps(result.to_json()))
    assert whole["summary"]["slo"]["attainment"] == 1.0
    assert parse(whole, ReplayResult) == result
    del whole["records"][0]["scheduled_s"]
    with pytest.raises(BenchError, match="missing or wrong"):
        parse(whole, ReplayResult)


@pytest.mark.parametrize("fault", ["refuse", "short", "break", "hang"])
async def test_a_bad_answer_is_recorded_as_such(fault: str) -> None:
    server = FakeOpenAI(fault=lambda number: fault if number == 3 else None)
    async with server.serve():
        result = await replayed(server, drain_timeout_s=0.5 if fault == "hang" else 60.0)
        if fault == "hang":
            await asyncio.wait_for(server.client_left.wait(), WAIT_S)
    expected = "timed_out" if fault == "hang" else "failed"
    assert sorted(r.status for r in result.records) == sorted(["ok"] * 5 + [expected])


async def test_all_requests_go_out_however_late_the_answers_are() -> None:
    server = FakeOpenAI(hold_until=6)
    async with server.serve():
        result = await replayed(server, warmup=0)
    assert [r.status for r in result.records] == ["ok"] * 6


def two_sessions(tmp_path: Path) -> str:
    """Two sessions of three and two turns; the third turn keeps less than the turns before it."""
    rows = [
        {"session_id": name, "timestamp": at, "input_length": given, "output_length": 3} | more
        for name, at, given, more in (
            ("a", 0, 20, {}),
            ("b", 0, 30, {}),
            ("a", 5, 40, {"delay": 20}),
            ("b", 5, 50, {"delay": 10}),
            ("a", 9, 15, {"delay": 20}),
        )
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "t.jsonl")


async def test_a_turn_follows_the_answer_before_it_and_has_it_in_its_prompt(
    tmp_path: Path,
) -> None:
    async with FakeOpenAI().serve() as server:
        found = await replayed(
            server, trace=two_sessions(tmp_path), shape=Shape(), warmup=0, speedup=1.0
        )
    assert [r.status for r in found.records] == ["ok"] * 5
    by_session: dict[str, list[list[int]]] = {}
    for session, body in zip(server.sessions, server.bodies, strict=True):
        by_session.setdefault(session, []).append(body["prompt"])
    first, second, third = by_session["bench-0-a"]
    assert second[:23] == [*first, 2, 1, 0]
    assert (len(second), third) == (40, second[:14] + third[14:])
    turns = [r for r in found.records if r.session == "bench-0-a"]
    assert [(r.turn, r.kept_tokens) for r in turns] == [(1, 0), (2, 23), (3, 14)]
    for before, turn in pairwise(turns):
        assert before.end_s is not None
        assert turn.scheduled_s == pytest.approx(before.end_s + 0.02)


async def test_a_failed_turn_ends_its_session_alone(tmp_path: Path) -> None:
    server = FakeOpenAI(fault=lambda number: "refuse" if number == 2 else None)
    async with server.serve():
        found = await replayed(
            server, trace=two_sessions(tmp_path), shape=Shape(), warmup=0, speedup=1.0
        )
    failed = next(r.session for r in found.records if r.status == "failed")
    for record in found.records:
        is_bad = record.session == failed and record.turn > 1
        assert record.status == ("failed" if is_bad else "ok")
    summary = found.summary().sessions
    assert summary is not None
    assert summary.time is not None
    assert (summary.time.count, summary.time.max) == (2, math.inf)
    assert summary.time.min < math.inf


async def test_an_endpoint_that_cannot_be_used_is_named() -> None:
    async with FakeOpenAI().serve() as server:
        server.models = [{"id": "a"}, {"id": "b"}]
        target = HttpTarget(f"{server.url}/v1/")
        assert (await target.model("b")).name == "b"
        for name, message in ((None, "choose a model with --model"), ("c", "'c' is not served")):
            with pytest.raises(BenchError, match=message):
                await target.model(name)
        with pytest.raises(BenchError, match="vocabulary size"):
            await replayed(server, model="b")
        await target.aclose()
    gone = HttpTarget(server.url)
    with pytest.raises(BenchError, match="is the server running there"):
        await gone.model(None)
    await gone.aclose()
    with pytest.raises(BenchError, match="is not like http://"):
        HttpTarget("localhost:8000")
    with pytest.raises(BenchError, match=r"is not like 127\.0\.0\.1"):
        GrpcTarget("http://h:1")
