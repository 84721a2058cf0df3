"""Traces read by the names of their columns, and what is refused of them, with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import TraceError
from benchmarks.trace_columns import Columns, load_columns

if TYPE_CHECKING:
    from pathlib import Path

BURST = """Timestamp,Model,Request tokens,Response tokens
5,ChatGPT,472,18
45.5,ChatGPT,1087,0
118,GPT-4,417,276
"""
COLUMNS = Columns("Timestamp", "Request tokens", "Response tokens")


def written(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_a_csv_is_read_by_its_columns(tmp_path: Path) -> None:
    trace = load_columns(written(tmp_path, "burst.csv", BURST), COLUMNS, drop_empty=True)
    assert trace.meta.name == "burst"
    found = [(row.arrival_s, row.input_tokens, row.output_tokens) for row in trace.requests]
    assert found == [(0.0, 472, 18), (113.0, 417, 276)]


@pytest.mark.parametrize(
    ("unit", "times"),
    [
        ("s", ("1", "3.5")),
        ("ms", ("1000", "3500")),
        ("us", ("1000000", "3500000")),
        ("ns", ("1000000000", "3500000000")),
        ("iso", ('"2024-01-01T00:00:01"', '"2024-01-01T00:00:03.5"')),
    ],
)
def test_times_are_read_in_their_unit(unit: str, times: tuple[str, str], tmp_path: Path) -> None:
    lines = "".join(f'{{"t": {at}, "in": 3, "out": 4.0}}\n' for at in times)
    columns = Columns("t", "in", "out", unit)  # type: ignore[arg-type]
    trace = load_columns(written(tmp_path, "t.jsonl", lines), columns)
    assert [row.arrival_s for row in trace.requests] == pytest.approx([0, 2.5])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", BURST, r"t.csv:3: output_length: 0 tokens"),
        ("t.csv", "Timestamp,Request tokens\n1,2\n", r"t.csv:2: Response tokens: missing"),
        ("t.csv", BURST.replace("472", "4.5"), r"t.csv:2: Request tokens: '4.5' is not a whole"),
        ("t.csv", BURST.replace("118", "soon"), r"t.csv:4: Timestamp: 'soon' is not a time in s"),
        ("t.csv", BURST.replace("118", "1"), r"t.csv:4: timestamp: earlier than the row before"),
        ("t.csv", BURST.replace("118", "nan"), r"t.csv:4: Timestamp: 'nan' is not a time"),
        ("t.csv", "Timestamp\n", r"t.csv: no requests in it"),
        ("t.jsonl", "\n[]\n", r"t.jsonl:2: not a JSON object"),
        ("t.jsonl", "{\n", r"t.jsonl:1: not JSON"),
        ("t.txt", "x", r"t.txt: unknown suffix '.txt'"),
    ],
)
def test_a_fault_is_refused_with_its_place(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    drop = "output_length" not in message
    with pytest.raises(TraceError, match=message):
        load_columns(written(tmp_path, name, text), COLUMNS, drop_empty=drop)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        load_columns(tmp_path / "none.csv", COLUMNS)
