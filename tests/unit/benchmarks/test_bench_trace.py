"""Reading, refusing and writing trace files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchError, TraceError
from benchmarks.trace import NAMED_TRACES, Trace, TraceMeta, TraceRequest, load_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE_ROW = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}


def _azure(path: Path, *rows: str, header: str = AZURE, end: str = "\n") -> str:
    path.write_text(end.join([header, *rows]) + end, newline="")
    return str(path)


def _jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_azure_times_count_from_the_first_row_to_100_ns(tmp_path: Path) -> None:
    rows = (
        "2023-11-16 23:59:59.9999999,374,44",
        "2023-11-17 00:00:00.0000001,396,109",
        "2023-11-17 00:01:00,1,1",
    )
    for end in ("\n", "\r\n"):
        trace = load_trace(_azure(tmp_path / "t.csv", *rows, "", end=end))
        assert trace.requests == (
            TraceRequest(0.0, 374, 44),
            TraceRequest(2e-7, 396, 109),
            TraceRequest(60.0000001 - 1e-7 + 1e-7, 1, 1),
        )
        assert trace.meta.block_size is None


def test_mooncake_rows_keep_their_prefix_ids(tmp_path: Path) -> None:
    row = MOONCAKE_ROW | {"timestamp": 3000, "hash_ids": [0, 2]}
    trace = load_trace(_jsonl(tmp_path / "t.jsonl", MOONCAKE_ROW, row), file_format="mooncake")
    assert trace.requests == (
        TraceRequest(0.0, 700, 5, (0, 1)),
        TraceRequest(3.0, 700, 5, (0, 2)),
    )
    assert trace.meta.block_size == 512


BAD_AZURE = [
    pytest.param("2023-11-16 18:15:46.68,12", None, id="missing column"),
    pytest.param("2023-11-16 18:15:46.68,1,2,3", None, id="extra column"),
    pytest.param("yesterday,1,2", "TIMESTAMP", id="time"),
    pytest.param("2023-11-16 18:15:46.6x,1,2", "TIMESTAMP", id="fraction"),
    pytest.param("2023-11-16 18:15:46.68,-1,2", "ContextTokens", id="negative"),
    pytest.param("2023-11-16 18:15:46.68,0,2", "ContextTokens", id="no input"),
    pytest.param("2023-11-16 18:15:46.68,1,", "GeneratedTokens", id="empty"),
    pytest.param("2023-11-16 18:15:46.68,1,0", "GeneratedTokens", id="no output"),
    pytest.param("2023-11-16 18:15:46.68,1,2.5", "GeneratedTokens", id="fractional"),
    pytest.param("2023-11-16 18:15:44,1,2", "timestamp", id="earlier than the one before"),
]


@pytest.mark.parametrize(("row", "field"), BAD_AZURE)
def test_a_bad_azure_row_is_refused_with_its_place(
    tmp_path: Path, row: str, field: str | None
) -> None:
    path = _azure(tmp_path / "t.csv", "2023-11-16 18:15:45.0,1,2", row)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (3, field)
    assert str(caught.value).startswith(f"{path}:3: ")


BAD_JSONL = [
    pytest.param("{", None, id="not JSON"),
    pytest.param([1], None, id="not an object"),
    pytest.param(MOONCAKE_ROW | {"delay": 5}, "delay", id="unknown field"),
    pytest.param({"input_length": 1, "output_length": 1}, "timestamp", id="no time"),
    pytest.param(MOONCAKE_ROW | {"timestamp": "0"}, "timestamp", id="time as text"),
    pytest.param(MOONCAKE_ROW | {"timestamp": True}, "timestamp", id="time as boolean"),
    pytest.param(MOONCAKE_ROW | {"timestamp": -1}, "timestamp", id="negative time"),
    pytest.param(json.dumps(MOONCAKE_ROW | {"timestamp": float("nan")}), "timestamp", id="NaN"),
    pytest.param({"timestamp": 0, "output_length": 1}, "input_length", id="no input length"),
    pytest.param(MOONCAKE_ROW | {"output_length": 1.5}, "output_length", id="fractional"),
    pytest.param(MOONCAKE_ROW | {"output_length": 0}, "output_length", id="no output"),
    pytest.param(MOONCAKE_ROW | {"hash_ids": [0]}, "hash_ids", id="too few blocks"),
    pytest.param(MOONCAKE_ROW | {"hash_ids": [0, 1, 2]}, "hash_ids", id="too many blocks"),
    pytest.param(MOONCAKE_ROW | {"hash_ids": [0, "1"]}, "hash_ids", id="id as text"),
    pytest.param(MOONCAKE_ROW | {"session_id": 4}, "session_id", id="session as number"),
]


@pytest.mark.parametrize(("row", "field"), BAD_JSONL)
def test_a_bad_json_row_is_refused_with_its_place(
    tmp_path: Path, row: object, field: str | None
) -> None:
    path = _jsonl(tmp_path / "t.jsonl", MOONCAKE_ROW, row)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (2, field)


BAD_FILES = [
    pytest.param("t.csv", b"", "first line must be", id="empty CSV"),
    pytest.param("t.csv", AZURE.encode(), "no requests", id="CSV of a header"),
    pytest.param("t.csv", b"a,b,c\n1,2,3\n", "first line must be", id="another header"),
    pytest.param("t.jsonl", b"\n", "no requests", id="empty JSON lines"),
    pytest.param("t.jsonl", b"\xff\xfe", "not UTF-8", id="not text"),
    pytest.param("t.parquet", b"x", "unknown suffix", id="unknown suffix"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load_trace(str(tmp_path / name))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BenchError, match="give one of chat, code, longchat"):
        load_trace("chta")


BAD_META = [
    pytest.param({"colour": "red"}, "colour", id="unknown"),
    pytest.param({"block_size": 0}, "block_size", id="no block"),
    pytest.param({"block_size": "16"}, "block_size", id="block as text"),
    pytest.param({"tick_s": -1}, "tick_s", id="negative tick"),
    pytest.param({"hash_scope": "planet"}, "hash_scope", id="unknown scope"),
    pytest.param({"hash_scope": "session"}, "session_id", id="rows lack the session"),
    pytest.param({"name": 3}, "name", id="name as number"),
]


@pytest.mark.parametrize(("meta", "field"), BAD_META)
def test_a_bad_sidecar_is_refused_with_its_field(
    tmp_path: Path, meta: dict[str, object], field: str
) -> None:
    path = _jsonl(tmp_path / "t.jsonl", MOONCAKE_ROW)
    (tmp_path / "t.meta.json").write_text(json.dumps(meta))
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert caught.value.field == field


def test_a_trace_changed_after_it_was_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(Trace(TraceMeta(name="t"), (TraceRequest(0.0, 1, 1),)), path)
    load_trace(str(path))
    path.write_text(path.read_text().replace('"input_length": 1', '"input_length": 2'))
    with pytest.raises(TraceError, match="sha256"):
        load_trace(str(path))


@pytest.mark.parametrize("name", NAMED_TRACES)
def test_a_shipped_trace_survives_conversion(tmp_path: Path, name: str) -> None:
    trace = load_trace(name)
    write_trace(trace, tmp_path / "copy.jsonl")
    copy = load_trace(str(tmp_path / "copy.jsonl"))
    assert copy.digest() == trace.digest()
    assert replace(copy.meta, sha256="") == replace(trace.meta, sha256="")
    assert [row.arrival_s for row in copy.requests] == pytest.approx(
        [row.arrival_s for row in trace.requests], abs=1e-7
    )


def test_the_digest_sees_lengths_and_prefixes_but_not_times() -> None:
    meta = TraceMeta(name="t", block_size=4)
    row = TraceRequest(0.0, 6, 2, (1, 2))
    first = Trace(meta, (row,)).digest()
    assert Trace(meta, (replace(row, arrival_s=9.0),)).digest() == first
    for other in (
        replace(row, input_tokens=5),
        replace(row, output_tokens=3),
        replace(row, hash_ids=(1, 3)),
        replace(row, hash_ids=None),
        replace(row, session_id="a"),
    ):
        assert Trace(meta, (other,)).digest() != first


def test_the_tick_of_a_rounded_log_is_inferred(tmp_path: Path) -> None:
    times = [0, 0, 0, 2000, 2000, 4001, 4001, 4001, 9000]
    row = {"input_length": 1, "output_length": 1}
    rounded = _jsonl(tmp_path / "rounded.jsonl", *({"timestamp": t} | row for t in times))
    assert load_trace(rounded).meta.tick_s == pytest.approx(2.001)
    fine = _jsonl(tmp_path / "fine.jsonl", *({"timestamp": t * 10} | row for t in range(9)))
    assert load_trace(fine).meta.tick_s is None


def test_traces_joined_by_a_plus_come_at_the_same_rate_each() -> None:
    mixed = load_trace("chat+longchat")
    assert mixed.meta.name.count("+") == 1
    assert mixed.meta.block_size == 512
    assert mixed.meta.tick_s is None
    assert mixed.meta.licence == "CC-BY-4.0; Apache-2.0"
    arrivals = [row.arrival_s for row in mixed.requests]
    assert arrivals == sorted(arrivals)
    long = [row for row in mixed.requests if row.hash_ids is not None]
    # A request a second of each, until the shorter one ends; no volleys where ticks were.
    assert len(long) == pytest.approx(arrivals[-1], rel=0.01)
    assert len(set(arrivals)) > 0.99 * len(arrivals)
    assert load_trace("chat+longchat").digest() == mixed.digest()


def test_prefix_ids_of_mixed_traces_stay_apart(tmp_path: Path) -> None:
    def written(name: str, block_size: int = 4, scope: str = "global") -> str:
        path = tmp_path / f"{name}.jsonl"
        row = {"input_length": 5, "output_length": 1, "hash_ids": [0, 3], "session_id": "s"}
        path.write_text("".join(json.dumps({"timestamp": t, **row}) + "\n" for t in (0, 900)))
        meta = {"name": name, "block_size": block_size, "hash_scope": scope}
        path.with_suffix(".meta.json").write_text(json.dumps(meta))
        return str(path)

    a, b = written("a"), written("b")
    assert {row.hash_ids for row in load_trace(f"{a}+{b}").requests} == {(0, 3), (4, 7)}
    with pytest.raises(BenchError, match="cannot be mixed"):
        load_trace(f"{a}+{written('c', scope='session')}")
    with pytest.raises(BenchError, match="cannot be mixed"):
        load_trace(f"{a}+{written('d', block_size=3)}")
    with pytest.raises(BenchError, match="no trace"):
        load_trace("chat+nothing")
