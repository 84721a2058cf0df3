"""Traces: formats and what is refused, cutting, due times, and prompts that share prefixes."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from statistics import mean, median
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.traces import (
    Trace,
    TraceMeta,
    TraceRequest,
    agent_trace,
    infer_tick_s,
    load_trace,
)
from benchmarks.workload import PromptMaker, Shape, due_times_s, shape_workload, speedup_for

if TYPE_CHECKING:
    from pathlib import Path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "rows", "trace_format", "block_size", "tick_s"),
    [
        ("chat", 10_000, "azure", None, None),
        ("code", 8_819, "azure", None, None),
        ("longchat", 4_000, "mooncake", 512, 3.0),
    ],
)
def test_a_shipped_trace(
    name: str, rows: int, trace_format: str, block_size: int | None, tick_s: float | None
) -> None:
    trace = load_trace(name)
    assert len(trace.requests) == rows
    meta = trace.meta
    assert (meta.format, meta.block_size, meta.tick_s) == (trace_format, block_size, tick_s)
    assert trace.requests[0].arrival_s == 0.0
    assert meta.licence
    assert trace.digest() == load_trace(str(name)).digest()


def test_azure_times_keep_microseconds(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = load_trace(written(tmp_path, "a.csv", text))
    assert trace.requests == (TraceRequest(0.0, 374, 44), TraceRequest(4.314579, 396, 109))


def test_burstgpt_leaves_out_requests_that_failed(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    trace = load_trace(written(tmp_path, "b.csv", text))
    assert trace.requests == (TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276))
    assert trace.meta.format == "burstgpt"


def test_fields_that_are_not_needed_are_ignored(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}
    text = json.dumps(row | {"client_id": "x", "timestamp": 500}) + "\n" + json.dumps(row) + "\n"
    trace = load_trace(written(tmp_path, "m.jsonl", text))
    assert trace.ignored == ("client_id",)
    assert trace.meta.format == "mooncake"
    assert trace.requests[1] == TraceRequest(1.0, 600, 7, (1, 2))


GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 1}'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "of no known format"),
        ("t.csv", AZURE, "no requests in it"),
        ("t.csv", f"{AZURE}soon,1,2\n", "t.csv:2: Invalid RFC3339"),
        ("t.csv", f"{AZURE}2023-11-16 18:15:46,x,2\n", "got `str` - at `$.ContextTokens`"),
        ("t.csv", f"{AZURE}2023-11-16 18:15:46,1,0\n", "Expected `int` >= 1"),
        ("t.jsonl", "[]\n", "t.jsonl:1: Expected `object`, got `array`"),
        ("t.jsonl", f"{GOOD}\nnope\n", "t.jsonl:2: JSON is malformed"),
        ("t.jsonl", GOOD.replace("5", "0"), "Expected `int` >= 1 - at `$.input_length`"),
        ("t.jsonl", GOOD.replace("0,", "-1,", 1), "Expected `float` >= 0.0 - at `$.timestamp`"),
        ("t.jsonl", GOOD.replace("0,", "9,", 1) + "\n" + GOOD, "request 2 is earlier"),
        ("t.jsonl", GOOD[:-1] + ', "hash_ids": ["a"]}', "got `str` - at `$.hash_ids[0]`"),
        ("t.jsonl", GOOD[:-1] + ', "hash_ids": [1, 2]}', "which are 1 blocks of 512"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(BenchError, match=re.escape(message)):
        load_trace(written(tmp_path, name, text))


def test_a_sidecar_sets_the_block_size(tmp_path: Path) -> None:
    path = written(tmp_path, "t.jsonl", GOOD[:-1] + ', "hash_ids": [1, 2]}')
    written(tmp_path, "t.meta.json", '{"block_size": 4, "name": "mine", "sha256": "x"}')
    meta = load_trace(path).meta
    assert (meta.name, meta.block_size) == ("mine", 4)
    written(tmp_path, "t.meta.json", '{"block_size": 0}')
    with pytest.raises(BenchError, match="block_size"):
        load_trace(path)


def test_agents_have_the_published_figures() -> None:
    whole = agent_trace()
    assert whole == load_trace("agent") != agent_trace(seed=1)
    prompts = [row.input_tokens for row in whole.requests]
    total = sum(prompts)
    assert sum(row.kept_tokens for row in whole.requests) / total == pytest.approx(0.963, abs=0.01)
    assert total / len(prompts) == pytest.approx(123_000, rel=0.1)
    assert median(prompts) == pytest.approx(105_000, rel=0.1)
    assert len(prompts) / 200 == pytest.approx(69, rel=0.1)
    answers = [row.output_tokens for row in whole.requests]
    assert (mean(answers), median(answers)) == pytest.approx((439, 216), rel=0.1)
    pauses = [row.pause_s for row in whole.requests if row.kept_tokens]
    assert median(pauses) == pytest.approx(10.0, rel=0.1)


def test_turns_keep_what_their_lengths_or_their_blocks_say(tmp_path: Path) -> None:
    row = {"timestamp": 0, "session_id": "s", "delay": 1500}
    plain = [row | {"input_length": n, "output_length": 10} for n in (20, 50, 25)]
    path = written(tmp_path, "t.jsonl", "\n".join(map(json.dumps, plain)))
    assert [x.kept_tokens for x in load_trace(path).requests] == [0, 30, 24]
    assert load_trace(path).requests[1].pause_s == 1.5
    ids = [{"hash_ids": x} for x in ([1, 2, 3], [1, 2, 4], [1, 2, 4])]
    blocks = [a | b | {"input_length": 24} for a, b in zip(plain, ids, strict=True)]
    path = written(tmp_path, "b.jsonl", "\n".join(map(json.dumps, blocks)))
    written(tmp_path, "b.meta.json", '{"block_size": 8}')
    assert [x.kept_tokens for x in load_trace(path).requests] == [0, 16, 23]


def of_sessions(*turns: tuple[str, int]) -> Trace:
    rows = [TraceRequest(float(i), n, 1, session=name) for i, (name, n) in enumerate(turns)]
    return Trace(TraceMeta(name="t"), tuple(rows))


def test_sessions_are_taken_from_their_start_and_one_after_the_other() -> None:
    whole = of_sessions(("a", 1), ("b", 2), ("a", 3), ("b", 4), ("c", 5), ("a", 6), ("b", 7))

    def sent(**changes: int) -> list[int]:
        return [row.input_tokens for _, row in shape_workload(whole, Shape(**changes)).rows]

    assert sent(limit=4) == [1, 2, 3, 6]
    assert sent(limit=3, skip=4) == [2, 4, 7]
    assert sent(max_turns=2) == [1, 2, 3, 4, 5]
    assert sent(max_total_tokens=4) == [1, 2, 3]
    cut = shape_workload(whole, Shape(max_turns=1)).cut
    assert (cut.sessions, cut.shortened, cut.dropped) == (3, 4, 0)


def test_a_rounded_log_is_recognised() -> None:
    rounded = [TraceRequest(3.0 * (i // 4), 1, 1) for i in range(40)]
    assert infer_tick_s(rounded) == 3.0
    assert infer_tick_s([TraceRequest(float(i), 1, 1) for i in range(9)]) is None


def trace(*rows: tuple[int, int], block_size: int | None = None) -> Trace:
    requests = tuple(TraceRequest(float(i), x, y) for i, (x, y) in enumerate(rows))
    return Trace(TraceMeta(name="t", format="azure", block_size=block_size), requests)


def test_lengths_are_scaled_then_cut_then_dropped_then_limited() -> None:
    shape = Shape(scale_lengths=Fraction(1, 2), max_output_tokens=20, max_total_tokens=60, limit=2)
    workload = shape_workload(trace((80, 100), (90, 10), (20, 30), (2, 1)), shape)
    sent = [(number, x.input_tokens, x.output_tokens) for number, x in workload.rows]
    assert sent == [(0, 40, 20), (1, 45, 5)]
    assert (workload.cut.capped, workload.cut.dropped) == (1, 0)
    with pytest.raises(BenchError, match="raise --max-total-tokens"):
        shape_workload(trace((80, 100)), Shape(max_total_tokens=10))


def test_skipping_wraps_to_the_start_so_that_the_limit_is_kept() -> None:
    rows = trace(*((i + 1, 1) for i in range(10)))
    for skip in range(25):
        assert len(shape_workload(rows, Shape(skip=skip, limit=4)).rows) == 4


@given(st.sampled_from([1, 2, 8, 64, 512]))
@settings(max_examples=5, deadline=None)
def test_scaled_rows_keep_their_number_of_prefix_blocks(part: int) -> None:
    whole = load_trace("longchat")
    workload = shape_workload(whole, Shape(scale_lengths=Fraction(1, part), limit=300))
    assert workload.cut.block_size == 512 // part
    for _, row in workload.rows:
        assert -(-row.input_tokens // (512 // part)) == len(row.hash_ids or ())


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=40),
    st.integers(0, 3),
)
def test_spreading_a_tick_keeps_the_order_and_the_tick(ticks: list[int], seed: int) -> None:
    arrivals = [3.0 * tick for tick in sorted(ticks)]
    due = due_times_s(arrivals, tick_s=3.0, seed=seed)
    assert due == sorted(due)
    assert due == due_times_s(arrivals, tick_s=3.0, seed=seed)
    for at_s, due_s in zip(arrivals, due, strict=True):
        assert 0 <= due_s - (at_s - arrivals[0]) < 3.0


def test_the_speedup_gives_the_rate() -> None:
    due = [0.0, 1.0, 5.0, 9.0]
    assert speedup_for(due, 3.0) == pytest.approx(9.0)
    with pytest.raises(BenchError, match="two requests at different times"):
        speedup_for([1.0, 1.0], 2.0)


def test_prompts_share_the_blocks_that_the_trace_says() -> None:
    maker = PromptMaker("d", 0, 2048, 8)
    paths = {(1, 2, 3): 20, (1, 2, 4): 24, (1, 5): 11, (2, 3): 16}
    prompts = [maker.tokens("x", TraceRequest(0.0, n, 1, path)) for path, n in paths.items()]
    assert [len(prompt) for prompt in prompts] == list(paths.values())
    first, *others = prompts
    for other, agree in zip(others, (16, 8, 0), strict=True):
        assert other[:agree] == first[:agree]
        assert other[agree : agree + 4] != first[agree : agree + 4]
    assert all(256 <= token < 2048 - 256 for prompt in prompts for token in prompt)
    alone = [maker.tokens(name, TraceRequest(0.0, 9, 1)) for name in ("x", "y", "x")]
    assert alone[0] == alone[2] != alone[1]
    assert PromptMaker("d", 1, 2048, 8).tokens("x", TraceRequest(0.0, 9, 1)) != alone[0]
