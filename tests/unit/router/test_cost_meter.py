"""The meter: whether prefill apart from decode helps, by the same requests on modelled workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.cost.meter import MAX_OUTCOMES, MIN_OUTCOMES, WINDOW_S, Reading, Window, read
from router.cost.objective import Slo
from router.cost.outcome import Outcome
from router.cost.replay import Pool, replay
from router.cost.step_model import StepModel

# 10 ms a step, 1 ms a prompt token.
MODEL = StepModel((0.010, 1.0, 0.0, 0.0, 0.0), 100, 100, 4000, 0.0)
ONE = Pool(MODEL, 1)
SLO = Slo(ttft_s=2.0, tpot_s=0.015)


def outcome(at: float, prompt: int = 200, output: int = 101, **changes: object) -> Outcome:
    """As a prefill and a decode worker of MODEL's kind serve it when nothing waits."""
    ttft_s = 0.010 + prompt / 1e3
    found = Outcome("demo", at, prompt, 0, output, ttft_s, 0.010, ttft_s, 0.001, "p0", "d0")
    return replace(found, **changes)  # type: ignore[arg-type]


def steady(count: int, gap_s: float, **changes: object) -> list[Outcome]:
    return [outcome(i * gap_s, **changes) for i in range(count)]


def test_apart_a_token_waits_for_no_prompt_and_together_for_all_meanwhile() -> None:
    requests = steady(40, 0.5)
    apart, together = replay(requests, ONE, ONE), replay(requests, Pool(MODEL, 1))
    assert apart is not None
    assert together is not None
    assert {x.stall_s for x in apart} == {0.0}
    assert apart[5].ttft_s == pytest.approx(0.21)
    assert apart[5].tpot_s == pytest.approx(0.010)
    # In the second in which 100 tokens are decoded two more prompts come, of 200 ms each.
    assert together[5].stall_s == pytest.approx(0.004, rel=0.05)
    assert together[5].tpot_s == pytest.approx(0.014, rel=0.05)


def test_prompts_wait_for_each_other() -> None:
    burst = steady(4, 0.0)
    apart = replay(burst, ONE, ONE)
    assert apart is not None
    assert [round(x.ttft_s, 3) for x in apart] == [0.21, 0.42, 0.63, 0.84]
    more = replay(burst, ONE, Pool(MODEL, 2))
    assert more is not None
    assert [round(x.ttft_s, 3) for x in more] == [0.21, 0.21, 0.42, 0.42]


def test_a_prompt_that_was_computed_by_decode_stalls_there() -> None:
    requests = steady(10, 0.5)
    requests[3] = replace(requests[3], prefill_worker="d0")
    served = replay(requests, ONE, ONE)
    assert served is not None
    assert served[2].stall_s > 0
    assert served[4].stall_s == 0


def test_it_says_that_prefill_apart_helps_and_why() -> None:
    # Each of two aggregated workers would get two prompts a second, of 200 ms each.
    reading = read(steady(60, 0.24), ONE, ONE, replace(SLO, tpot_s=0.012))
    assert reading.measured == reading.modelled == 1.0
    assert reading.aggregated is not None
    assert reading.aggregated < 0.9
    assert reading.ratio == pytest.approx(1 / reading.aggregated)
    assert "P/D helps now" in reading.text
    assert f"delayed running decodes by {1e3 * reading.stall_s:.1f} ms a token" in reading.text


def test_it_says_that_prefill_apart_costs_where_prefill_is_the_bottleneck() -> None:
    requests = [
        replace(x, ttft_s=0.21 + 0.11 * i, tpot_s=None, output_tokens=1)
        for i, x in enumerate(steady(60, 0.1))
    ]
    reading = read(requests, ONE, ONE, replace(SLO, tpot_s=1.0))
    assert reading.ratio is not None
    assert reading.ratio < 0.6
    assert "P/D costs goodput now" in reading.text
    assert "sooner" in reading.text


def test_it_says_where_there_is_no_difference() -> None:
    reading = read(steady(30, 3.0), ONE, ONE, SLO)
    assert reading.ratio == 1.0
    assert "no difference" in reading.text


@pytest.mark.parametrize(
    ("requests", "prefill", "decode", "text"),
    [
        (steady(MIN_OUTCOMES - 1, 1.0), ONE, ONE, "Not known yet: 19 of 20"),
        (steady(30, 1.0), None, ONE, "no prefill worker"),
        (steady(30, 1.0), ONE, Pool(replace(MODEL, decode_steps=0), 1), "too little was measured"),
        (steady(30, 1.0), Pool(replace(MODEL, prefill_steps=0), 1), ONE, "too little was measured"),
        (steady(30, 1.0, ttft_s=9.0), ONE, ONE, "0% of the requests kept the SLOs"),
    ],
)
def test_it_says_that_it_does_not_know(
    requests: list[Outcome], prefill: Pool | None, decode: Pool | None, text: str
) -> None:
    reading: Reading = read(requests, prefill, decode, SLO)
    assert reading.ratio is None
    assert text in reading.text


def test_what_is_remembered_is_bounded_and_recent() -> None:
    window = Window()
    for i in range(2 * MAX_OUTCOMES):
        window.add(outcome(float(i)))
    now = 2.0 * MAX_OUTCOMES
    recent = window.recent(now)
    assert all(now - x.placed_at <= WINDOW_S for x in recent)
    assert recent == sorted(recent, key=lambda x: x.placed_at)
    assert len(window.recent(now - WINDOW_S)) <= MAX_OUTCOMES
