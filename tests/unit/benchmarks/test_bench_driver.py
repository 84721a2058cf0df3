"""A whole comparison of simulated arms, under a clock that moves only when it is waited for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from stepped_clock import SteppedClock

from benchmarks.compare import session
from benchmarks.compare.arms import parse_arms
from benchmarks.compare.plan import Replay
from benchmarks.compare.progress import CompareProgress, left_text, replay_s, replays_s
from benchmarks.compare.run import CompareSettings, fitting_scale, run_compare
from benchmarks.compare.session import ArmPlan
from benchmarks.compare.summary import summarise_compare
from benchmarks.records import Answer, Timeline
from benchmarks.targets import ServedModel
from benchmarks.trace import load_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.compare.result import CompareResult

SETTINGS = CompareSettings(
    trace="chat",
    rate_per_s=1.0,
    requests=30,
    rounds=2,
    probes=8,
    probe_s=60.0,
    slo_s={"ttft": 2.0},
    baseline="slow",
    face="http",
)


class Simulated:
    """Answers one request at a time, `capacity` of them a second, in the order of their arrival.

    `late` sends are held up before they go out, as a busy client would.
    """

    kind = "http"

    def __init__(self, clock: SteppedClock, capacity: float, late: int = 0) -> None:
        self.address = f"simulated at {capacity:g}/s"
        self.is_closed = False
        self._clock = clock
        self._each_s = 1 / capacity
        self._free_at = 0.0
        self._late = late

    async def model(self, name: str | None) -> ServedModel:
        return ServedModel(name or "m", max_model_len=8192, vocab_size=1536)

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> int:
        return output_tokens

    async def send(self, prepared: int, timeline: Timeline) -> None:
        if self._late:
            self._late -= 1
            self._clock.now_s += 1.0
        timeline.mark_sent()
        self._free_at = max(self._free_at, self._clock.now()) + self._each_s
        await self._clock.sleep_until(self._free_at)
        timeline.add_chunk(timeline.now(), prepared)
        timeline.complete(Answer(prompt_tokens=None, completion_tokens=prepared))

    async def aclose(self) -> None:
        self.is_closed = True


async def compare(
    settings: CompareSettings,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    late: int = 0,
) -> tuple[CompareResult, str]:
    """The result of comparing 6 requests a second with 3, and what a person was told meanwhile."""
    clock = SteppedClock()
    made: list[Simulated] = []

    def open_target(url: str, *_: object) -> Simulated:
        made.append(Simulated(clock, float(url.rpartition("/")[2]), late))
        return made[-1]

    monkeypatch.setattr(session, "open_http", open_target)
    arms = parse_arms(["fast=http://simulated/6", "slow=http://simulated/3"])
    console = Console(width=200, force_terminal=False)
    ticking = asyncio.create_task(clock.run())
    with console.capture() as told, CompareProgress(console, settings, len(arms)) as progress:
        plans = [ArmPlan(arm, None) for arm in arms]
        result = await run_compare(settings, plans, progress, directory=directory, clock=clock)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    assert all(target.is_closed for target in made)
    return result, told.get()


async def test_a_sweep_finds_what_is_known_of_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, told = await compare(SETTINGS, tmp_path, monkeypatch)
    fast, slow = summarise_compare(result).arms
    assert fast.sweep is not None
    assert slow.sweep is not None
    for arm, capacity in ((fast, 6.0), (slow, 3.0)):
        assert arm.sweep is not None
        passed, failed = arm.sweep.found.passed, arm.sweep.found.failed
        assert passed is not None
        assert failed is not None
        # Requests come in bursts: the limit is met up to somewhat under what is served on average.
        assert 0.6 * capacity < passed < failed < 1.5 * capacity
        assert len(arm.sweep.probes) <= SETTINGS.probes
    assert fast.sweep.ratio == pytest.approx(2.0, rel=0.25)
    assert fast.figures["attainment"].value == 1.0
    assert "round 2 of 2, slow: 30 of 30 at 1.00/s" in told
    assert "probe 1 of 8 at most, fast" in told
    assert " left" in told


async def test_arms_take_turns_with_the_same_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = await compare(replace(SETTINGS, probes=0), tmp_path, monkeypatch)
    assert [(m.arm, m.number) for m in result.measurements] == [
        ("fast", 0),
        ("slow", 0),
        ("slow", 1),
        ("fast", 1),
    ]
    sent = [[(r.index, r.input_tokens) for r in m.records] for m in result.measurements]
    assert sent[0] == sent[1]
    assert sent[2] == sent[3]
    assert sent[0] != sent[2]
    assert {len(records) for records in sent} == {30}
    assert result.settings["scale_lengths"] == "1"
    assert all(not m.repeated for m in result.measurements)


async def test_a_replay_with_a_late_client_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(SETTINGS, probes=0, rounds=1)
    # One for the warm-up's own, eight in it, one before the round; then the round's first is late.
    result, _ = await compare(short, tmp_path, monkeypatch, late=11)
    assert [m.repeated for m in result.measurements] == [True, True]
    validity = summarise_compare(result).validity
    assert not any("sent late" in reason for reason in validity.invalid)
    assert any("2 of 2 replays were repeated" in caution for caution in validity.cautions)


async def test_a_client_that_stays_late_makes_the_run_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(SETTINGS, probes=0, rounds=1)
    result, _ = await compare(short, tmp_path, monkeypatch, late=1000)
    reasons = summarise_compare(result).validity.invalid
    assert any(reason.startswith("round 1 of fast: the client sent late") for reason in reasons)


def test_lengths_are_halved_until_a_processor_can_bear_them() -> None:
    found = {name: fitting_scale(load_trace(name)) for name in ("chat", "code", "longchat")}
    assert found == {"chat": Fraction(1, 4), "code": Fraction(1, 4), "longchat": Fraction(1, 32)}


def test_the_time_left_is_told() -> None:
    assert [left_text(x) for x in (185, 59.6, -3)] == ["3:05 left", "1:00 left", "0:00 left"]
    replay = Replay("a", "round", 0, rate_per_s=2.0, requests=30, skip=0, seed=0)
    assert replay_s(replay) == 17.0
    both: Any = replays_s(replace(SETTINGS, probes=1, rounds=1, rate_per_s=2.0), arms=2)
    assert both == 2 * (17 + 62)
