"""What is said of a comparison of parted phases with the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compared import arm, measured, record, result, rounds

from benchmarks import phases
from benchmarks.compare import series
from benchmarks.standard.sets import read_standard

if TYPE_CHECKING:
    import pytest

    from benchmarks.compare.result import CompareResult

ARMS = [arm("1P1D"), arm("2A"), arm("nixl")]


def probe(name: str, rate: float, met: int) -> Any:
    records = [record(i, ttft_s=0.1 if i < met else 0.9) for i in range(10)]
    return measured(name, 0, records, kind="probe", rate_per_s=rate)


def swept(**rates: float) -> CompareResult:
    return result([probe(name, rate, 10 if rate else 1) for name, rate in rates.items()], ARMS)


def test_the_best_of_the_others_is_what_counts() -> None:
    lines = phases.said(swept(**{"1P1D": 3.0, "2A": 1.5, "nixl": 2.0}))
    assert "highest rate within the limits, 1P1D / nixl, the best other: 1.50" in lines
    assert "1P1D: over 3.00 requests/s" in lines
    without = phases.said(swept(**{"1P1D": 3.0, "2A": 0.0, "nixl": 0.0}))
    assert not any("best other" in line for line in without)


def test_gaps_are_compared_with_the_baseline() -> None:
    found = result([*rounds("1P1D", [0.1] * 3), *rounds("2A", [0.2] * 3)])
    lines = phases.said(found)
    assert any(line.startswith("ITL p99, 1P1D / 2A: 1.00") for line in lines)


def test_every_set_is_made_of_options_that_compare_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    def drive(settings: Any, plans: Any, _console: Any, directory: Path) -> CompareResult:
        made.append((settings, plans))
        directory.mkdir(parents=True)
        return result([*rounds("1P1D", [0.1] * 3), *rounds("2A", [0.2] * 3)])

    monkeypatch.setattr(series, "drive", drive)
    argv = ["--model", "demo", "--out", str(tmp_path), "--cores", "2"]
    assert phases.main(argv) == 0
    assert [settings.face for settings, _ in made] == ["grpc", "http", "http"]
    for settings, plans in made:
        caches = {p.config["worker"]["engine_args"]["kv_cache_memory_bytes"] for p in plans}
        assert len(caches) == 1
        assert plans[0].config["router"]["slo"]["tpot_s"] == settings.slo_s["tpot"]
    assert "longchat: ITL p99" in capsys.readouterr().out
    assert phases.main([*argv, "--rounds", "0", "--only", "gaps"]) == series.EXIT_BAD_INPUT


def test_the_readme_says_what_is_kept() -> None:
    readme = (phases.ROOT / "README.md").read_text(encoding="utf-8")
    path = phases.kept_path(phases.ROOT)
    assert readme == phases.with_phases(readme, read_standard(path) if path.exists() else None)


def test_what_is_run_replaces_the_same_comparison_and_leaves_the_others(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# title\n{phases.BEGIN}\n{phases.END}\n")
    first = swept(**{"1P1D": 3.0, "2A": 1.5, "nixl": 2.0})
    phases.keep({"longchat": first, "chat": first}, tmp_path, Path("/models/large"))
    second = swept(**{"1P1D": 3.5, "2A": 1.5, "nixl": 2.0})
    phases.keep({"chat": second}, tmp_path, Path("/models/large"))
    kept = read_standard(phases.kept_path(tmp_path))
    assert dict(kept.results) == {"longchat": first, "chat": second}
    text = readme.read_text()
    assert "| longchat | 1P1D |" in text
    assert "over 3.50" in text
