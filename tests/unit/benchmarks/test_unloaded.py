"""What `benchmarks.unloaded` makes of the times it took: all by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import unloaded
from benchmarks.unloaded import IN_PROCESS, OURS, Sample, summary

if TYPE_CHECKING:
    from collections.abc import Sequence


def _sample(arm: str, turn: int, times_s: Sequence[float]) -> Sample:
    moved = {"prefill_s": 1.0, "digest_s": 0.01} if arm == OURS else {}
    return Sample(arm, turn, 128, times_s, **moved)


def test_ratios_are_those_of_one_round_and_the_hand_over_is_told_in_steps() -> None:
    samples = []
    # The second round is ten times as slow for all: it decides no ratio.
    for turn, slow in ((1, 1.0), (2, 10.0), (3, 1.0)):
        samples += [
            _sample(OURS, turn, [1.1 * slow, 1.4 * slow, 1.6 * slow, 1.8 * slow]),
            _sample("1A", turn, [1.1 * slow, 1.3 * slow, 1.5 * slow, 1.7 * slow]),
            _sample(IN_PROCESS, turn, [1.0 * slow, 1.2 * slow, 1.4 * slow, 1.6 * slow]),
        ]
    (row,) = summary(samples)
    assert row["ttft_s"][f"/ {IN_PROCESS}"] == pytest.approx(1.1)
    assert row["tpot_s"][f"/ {IN_PROCESS}"] == pytest.approx(0.7 / 0.6)
    assert row["tpot2_s"][f"/ {IN_PROCESS}"] == pytest.approx(1.0)
    assert row["tpot2_s"][OURS] == pytest.approx(0.2)
    assert row["handover_steps"] == pytest.approx(0.5)


def test_an_answer_too_short_to_have_a_second_gap_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["unloaded", "--tokens", "2"])
    with pytest.raises(SystemExit) as refused:
        unloaded.main()
    assert refused.value.code == 2
    assert "--tokens must be 3 or more: 2" in capsys.readouterr().err
