"""Results as files: everything kept, the summary a function of the records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchError
from benchmarks.result import ReplayResult, host_facts, read_result, write_result

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RecordMaker


@pytest.fixture
def result(make_record: RecordMaker) -> ReplayResult:
    return ReplayResult(
        created="2024-01-01T00:00:00+00:00",
        trace={"name": "t"},
        workload={"requests": 3},
        target={"kind": "http"},
        settings={"seed": 0},
        slo_s={"ttft": 0.5},
        host=host_facts(),
        records=(
            make_record(0.0, 0.001, [0.25, 0.5], receipt={"queue_s": 0.5, "fallbacks": ["x"]}),
            make_record(1.0, 1.0, [2.0, 2.5], chunk_tokens=None, output_tokens=4),
            make_record(2.0, None, [], status="failed", output_tokens=2),
        ),
        warmup=(make_record(0.0, 0.0, [1.0]),),
    )


def test_a_result_is_read_as_it_was_written(tmp_path: Path, result: ReplayResult) -> None:
    path = tmp_path / "result.json"
    write_result(result, path)
    read = read_result(path)
    assert read == result
    assert read.to_json() == result.to_json() == json.loads(path.read_text())


def test_warm_up_is_kept_but_not_counted(result: ReplayResult) -> None:
    assert result.summary().requests == 3
    assert len(result.to_json()["warmup"]) == 1  # type: ignore[arg-type]


def test_infinite_percentiles_are_written_as_null(result: ReplayResult) -> None:
    text = json.dumps(result.to_json(with_records=False), allow_nan=False)
    summary = json.loads(text)["summary"]
    assert summary["adjusted"]["ttft"]["max"] is None
    assert summary["latency"]["ttft"]["max"] == 1.0
    assert "records" not in json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a result"),
        ('{"schema": "other/1"}', "not a result"),
        ('{"schema": "pdserve.bench.replay/1"}', "lacks part of a result"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_result(path)


def test_a_record_of_other_fields_is_refused(tmp_path: Path, result: ReplayResult) -> None:
    path = tmp_path / "result.json"
    whole = result.to_json()
    del whole["records"][0]["sent_s"]  # type: ignore[index]
    whole["records"][0]["sentence"] = 1  # type: ignore[index]
    path.write_text(json.dumps(whole))
    with pytest.raises(BenchError, match="sentence"):
        read_result(path)


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path, result: ReplayResult) -> None:
    with pytest.raises(BenchError, match="cannot write"):
        write_result(result, tmp_path / "no" / "result.json")
    with pytest.raises(BenchError, match="cannot read"):
        read_result(tmp_path / "none.json")
