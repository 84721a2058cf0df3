"""Traces: formats, what is refused and where, and mixing."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchError
from benchmarks.traces import TraceRequest, infer_tick_s, load_trace

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


def test_a_rounded_log_is_recognised() -> None:
    rounded = [TraceRequest(3.0 * (i // 4), 1, 1) for i in range(40)]
    assert infer_tick_s(rounded) == 3.0
    assert infer_tick_s([TraceRequest(float(i), 1, 1) for i in range(9)]) is None
