"""The standard set, what is kept of it, and the README's table, which is what a kept run says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from compared import SETTINGS, arm, measured, record, result, rounds

from benchmarks.compare import series
from benchmarks.compare.files import report
from benchmarks.errors import BenchError
from benchmarks.standard import __main__ as program
from benchmarks.standard.readme import BEGIN, END, table, with_table
from benchmarks.standard.sets import (
    SCHEMA,
    SETS,
    StandardResult,
    newest,
    read_standard,
    write_standard,
)

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult

ROOT = Path(__file__).resolve().parents[3]
EMPTY = f"# title\n{BEGIN}\n{END}\nafter\n"


def probe(name: str, number: int, met: int) -> Any:
    records = [record(i, ttft_s=0.1 if i < met else 0.9) for i in range(10)]
    return measured(name, number, records, kind="probe", rate_per_s=2.0 + number)


ROUNDS = [*rounds("1P1D", [0.1, 0.2, 0.15]), *rounds("2A", [0.2, 0.4, 0.3])]
PROBES = [probe("1P1D", 0, 10), probe("1P1D", 1, 5), probe("2A", 0, 8)]
RUN = StandardResult(
    "2026-01-02T03:04:05+00:00", {"chat": result([*ROUNDS, *PROBES]), "longchat": result(ROUNDS)}
)
LATE = result([*rounds("1P1D", [0.1] * 3, lag_s=0.5), *rounds("2A", [0.2] * 3)])


def test_the_readme_says_what_the_newest_kept_run_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_table(readme, newest(ROOT / "benchmarks" / "results"))


def test_a_table_has_figures_ratios_and_what_was_measured() -> None:
    text = table(RUN)
    assert "| chat | 1P1D | / 2A | 2A |" in text
    assert "| longchat | 1P1D | / 2A | 2A |" in text
    ttft = next(line for line in text.splitlines() if line.startswith("| TTFT p50, ms"))
    assert "150.0 [100.0, 200.0] | 0.50 [0.50, 0.50] | 300.0 [200.0, 400.0]" in ttft
    capacity = next(line for line in text.splitlines() if line.startswith("| highest rate"))
    assert "2.00 (fails at 3.00) | - | under 2.00" in capacity
    assert "limits TTFT 250 ms, TPOT 60 ms" in text
    assert "INVALID: round 1 of 1P1D" in table(replace(RUN, results={"chat": LATE}))
    assert table(None) == "No run is kept yet.\n"


def test_only_what_is_between_the_markers_is_replaced() -> None:
    once = with_table(EMPTY, RUN)
    assert once.startswith("# title\n")
    assert once.endswith("after\n")
    assert with_table(once, RUN) == once
    assert with_table(once, None) == with_table(EMPTY, None)
    with pytest.raises(BenchError, match="lacks its markers"):
        with_table("# title\n", RUN)


def test_a_kept_run_is_named_by_day_and_machine_and_the_newest_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    cpu = replace(SETTINGS, of_workers={"device": ("cpu",)})
    on_cpu = result(ROUNDS, [arm("1P1D", settings=cpu), arm("2A", settings=cpu)])
    on_cpu = replace(on_cpu, host={"cores": 8, "system": "Linux x86_64"})
    older = StandardResult("2025-12-31T00:00:00+00:00", {"chat": on_cpu})
    assert write_standard(older, tmp_path).name == "2025-12-31-8-core-x86_64-cpu.json"
    path = write_standard(RUN, tmp_path / "deeper")
    assert read_standard(path) == RUN
    write_standard(RUN, tmp_path)
    found = newest(tmp_path)
    assert found is not None
    assert found.created == RUN.created
    (tmp_path / "other.json").write_text("{}")
    assert newest(tmp_path) == found
    (tmp_path / "2026-01-01-wrong.json").write_text("{}")
    with pytest.raises(BenchError, match="not a run of the standard set"):
        newest(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(EMPTY)
    return tmp_path


def run(
    root: Path, monkeypatch: pytest.MonkeyPatch, found: CompareResult, *argv: str
) -> tuple[int, list[Any]]:
    """The exit status, and the settings of every comparison that was made."""
    made: list[Any] = []

    def drive(settings: Any, _plans: Any, _console: Any, directory: Path) -> CompareResult:
        made.append(settings)
        directory.mkdir(parents=True)
        return found

    monkeypatch.setattr(series, "drive", drive)
    return program.main(["--root", str(root), "--cores", "2", *argv]), made


def test_a_valid_run_is_kept_and_the_readme_is_refreshed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, made = run(root, monkeypatch, RUN.results["chat"])
    assert status == 0
    assert [settings.trace for settings in made] == list(SETS)
    kept = newest(root / "benchmarks" / "results")
    assert kept is not None
    assert list(kept.results) == list(SETS)
    assert (root / "README.md").read_text() == with_table(EMPTY, kept)
    assert (root / "build" / "bench" / "chat" / "report.html").exists()
    assert "kept as benchmarks/results/" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--only", "chat"], ["--no-keep"]])
def test_a_part_of_a_run_is_not_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    assert run(root, monkeypatch, RUN.results["chat"], *argv)[0] == 0
    assert not (root / "benchmarks").exists()
    assert (root / "README.md").read_text() == EMPTY


def test_an_invalid_run_is_not_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, monkeypatch, LATE)[0] == 3
    assert not (root / "benchmarks").exists()
    assert "not kept: the run is invalid" in capsys.readouterr().err


def test_options_go_to_every_comparison(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, made = run(root, monkeypatch, RUN.results["chat"], "--rounds", "9", "--seed", "4")
    assert status == 0
    assert {(settings.rounds, settings.seed) for settings in made} == {(9, 4)}
    assert {settings.requests for settings in made} == {60, 40}
    assert run(root, monkeypatch, LATE, "--baseline", "9A")[0] == 2


def test_a_kept_run_does_not_say_where_the_checkout_lies(tmp_path: Path) -> None:
    results = {name: replace(r, baseline=f"{ROOT}/model") for name, r in RUN.results.items()}
    kept = write_standard(StandardResult(RUN.created, results), tmp_path)
    assert str(ROOT) not in kept.read_text(encoding="utf-8")
    assert {r.baseline for r in read_standard(kept).results.values()} == {"model"}


def test_a_kept_run_is_reported_whole_or_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_standard(RUN, tmp_path)
    assert report(path, html=None, as_json=False) == 0
    shown = capsys.readouterr().out
    assert shown.index("chat") < shown.index("longchat")
    assert report(path, html=tmp_path / "page.html", as_json=True, only="longchat") == 0
    assert json.loads(capsys.readouterr().out)["baseline"] == "2A"
    assert (tmp_path / "page.html").exists()
    with pytest.raises(BenchError, match="--only one of chat, longchat"):
        report(path, html=None, as_json=True)
    with pytest.raises(BenchError, match="no comparison called 'code', but chat, longchat"):
        report(path, html=None, as_json=False, only="code")


KEPT = sorted(
    path
    for path in (ROOT / "benchmarks" / "results").glob("*.json")
    if f'"schema":"{SCHEMA}"' in path.read_text(encoding="utf-8")[:200]
)


@pytest.mark.parametrize("path", KEPT)
def test_what_is_kept_can_be_reported(path: Path) -> None:
    assert report(path, html=None, as_json=False) in (0, 3)


def test_runs_are_kept() -> None:
    assert len(KEPT) >= 2
