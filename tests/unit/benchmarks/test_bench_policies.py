"""The default policy beside fixed ones: what is sent, and what the intervals prove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from compared import arm, measured, record, result

from benchmarks.bootstrap import pooled_ratio
from benchmarks.compare import series
from benchmarks.compare.cli import EXIT_INVALID
from benchmarks.errors import BenchError
from benchmarks.policies import __main__ as program
from benchmarks.policies.sets import DEFAULT, FIXED, SETS, options_of
from benchmarks.policies.verdict import verdicts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.compare.result import CompareResult

QUICK_POLICIES = f"{DEFAULT},always_local"


def kept(of: Mapping[str, Sequence[int]], **changes: Any) -> CompareResult:
    """Rounds of ten requests, of which so many keep the limits, for each arm."""
    found = [
        measured(
            name, number, [record(i, ttft_s=0.1 if i < n else 0.9, **changes) for i in range(10)]
        )
        for name, rounds in of.items()
        for number, n in enumerate(rounds)
    ]
    return result(found, [arm(name) for name in of], baseline=DEFAULT)


@pytest.mark.parametrize(
    ("own", "other", "word"),
    [
        ((9, 9, 9), (9, 9, 9), "no worse"),
        ((9, 10, 8), (10, 8, 9), "no worse"),
        ((8, 9, 8), (10, 10, 10), "worse"),
        ((10, 9, 10), (7, 8, 8), "better"),
        ((9, 9), (9, 9), "not known"),
        ((9, 9, 9), (9, 0, 9), "not known"),
    ],
)
def test_a_verdict_is_what_the_interval_proves(
    own: Sequence[int], other: Sequence[int], word: str
) -> None:
    (found,) = verdicts("chat", DEFAULT, kept({DEFAULT: own, "round_robin": other}))
    assert found.word == word
    assert found.is_best
    assert found.text(DEFAULT).startswith(f"chat: {DEFAULT} is ")
    assert ("[" in found.text(DEFAULT)) == (word != "not known")


def test_the_best_fixed_choice_comes_first_and_is_named() -> None:
    rounds = {DEFAULT: (9, 9, 9), "round_robin": (5, 6, 5), "always_local": (9, 9, 8)}
    found = verdicts("mix", DEFAULT, kept(rounds))
    assert [(x.other, x.is_best) for x in found] == [
        ("always_local", True),
        ("round_robin", False),
    ]
    assert "always_local, the best fixed choice," in found[0].text(DEFAULT)


def test_one_bad_round_shows_in_a_pooled_ratio() -> None:
    found = pooled_ratio([(10.0, 10.0)] * 4 + [(5.0, 10.0)], "seed")
    assert found is not None
    assert found.value == pytest.approx(0.9)
    assert found.low is not None
    assert found.low < 0.9
    assert pooled_ratio([], "seed") is None
    assert pooled_ratio([(1.0, 0.0)], "seed") is None


def test_arms_are_alike_but_for_their_policy() -> None:
    for traffic in SETS:
        options = options_of(
            traffic, (DEFAULT, *FIXED), "2P2D", is_quick=False, more=["--seed", "7"]
        )
        assert options[options.index("--arms") + 1].split(",")[0] == f"{DEFAULT}=2P2D"
        set_here = [options[i + 1] for i, x in enumerate(options) if x == "--arm-set"]
        assert set_here == [f"{name}:router.policy={name}" for name in (DEFAULT, *FIXED)]
        assert "--seed" in options
    with pytest.raises(BenchError, match="needs slo_aware and another"):
        options_of("chat", FIXED, "1P1D", is_quick=False)


@pytest.mark.parametrize(
    ("own", "status"), [((9, 9, 9), 0), ((5, 5, 6), program.EXIT_WORSE), ((9, 9), 0)]
)
def test_the_exit_status_says_whether_it_is_worse_anywhere(
    own: Sequence[int],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def drive(settings: Any, _plans: Any, _console: Any, directory: Path) -> CompareResult:
        asked.append(settings)
        directory.mkdir(parents=True)
        return kept({DEFAULT: own, "always_local": (9, 9, 9)[: len(own)]})

    monkeypatch.setattr(series, "drive", drive)
    argv = ["--out", str(tmp_path), "--cores", "2", "--policies", QUICK_POLICIES]
    assert program.main(argv) == status
    assert [x.trace for x in asked] == ["chat", "code", "longchat", "chat+code+longchat"]
    assert f"mix: {DEFAULT} is " in capsys.readouterr().out
    assert program.main([*argv, "--policies", "round_robin"]) == series.EXIT_BAD_INPUT


def test_an_invalid_run_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = kept({DEFAULT: (9, 9, 9), "always_local": (9, 9, 9)}, lag_s=0.5)

    def drive(_settings: Any, _plans: Any, _console: Any, directory: Path) -> CompareResult:
        directory.mkdir(parents=True)
        return late

    monkeypatch.setattr(series, "drive", drive)
    argv = ["--out", str(tmp_path), "--cores", "2", "--policies", QUICK_POLICIES]
    assert program.main([*argv, "--only", "chat"]) == EXIT_INVALID
    assert "INVALID, for the reasons above: chat" in capsys.readouterr().out
