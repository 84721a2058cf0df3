"""The search for the highest rate, against arms of a known capacity; and the order of replays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.compare import plan
from benchmarks.compare.sweep import CLOSE, Bracket, Probe, bracket, next_rate


def sweep(capacity: float, *, first: float, limit: int) -> list[Probe]:
    """All probes of an arm that keeps its limits up to `capacity` and not above."""
    probes: list[Probe] = []
    while (rate := next_rate(probes, first=first, limit=limit)) is not None:
        probes.append(Probe(rate, 1.0 if rate <= capacity else 0.0))
    return probes


@settings(deadline=None)  # a busy machine
@given(st.floats(0.05, 500), st.floats(0.1, 50))
def test_a_known_capacity_is_closed_in_on(capacity: float, first: float) -> None:
    found = bracket(sweep(capacity, first=first, limit=40))
    assert found.passed is not None
    assert found.failed is not None
    assert found.passed <= capacity < found.failed
    assert found.failed / found.passed <= CLOSE


@settings(deadline=None)  # a busy machine
@given(st.floats(0.001, 5000), st.floats(0.1, 50), st.integers(1, 12))
def test_probes_are_bounded_and_never_repeated(capacity: float, first: float, limit: int) -> None:
    rates = [probe.rate_per_s for probe in sweep(capacity, first=first, limit=limit)]
    assert 1 <= len(rates) <= limit
    assert len(set(rates)) == len(rates)


def test_the_search_goes_as_it_is_written() -> None:
    rates = [probe.rate_per_s for probe in sweep(5.0, first=2.0, limit=5)]
    assert rates == pytest.approx([2, 4, 8, 32**0.5, (4 * 32**0.5) ** 0.5])
    assert [x.rate_per_s for x in sweep(0.6, first=2.0, limit=3)] == [2, 1, 0.5]


def test_a_pass_above_a_failure_is_luck() -> None:
    probes = [Probe(1, 1.0), Probe(2, 0.5), Probe(4, 0.95)]
    assert bracket(probes) == Bracket(1, 2)
    assert bracket([Probe(1, 0.89)]) == Bracket(None, 1)
    assert bracket([Probe(1, 0.9)]) == Bracket(1, None)
    assert bracket([]) == Bracket(None, None)


def test_rounds_take_turns_and_send_every_arm_the_same() -> None:
    replays = list(plan.rounds(["a", "b"], 2.0, 40, 3, seed=1))
    assert [replay.arm for replay in replays] == ["a", "b", "b", "a", "a", "b"]
    sent = [(replay.number, replay.skip, replay.requests, replay.seed) for replay in replays]
    assert sent[::2] == sent[1::2]
    assert [skip for _, skip, _, _ in sent[::2]] == [0, 40, 80]


def test_no_two_replays_of_an_arm_share_a_prompt() -> None:
    replays = [
        *plan.warmups(["a"], 2.0, 40, seed=0),
        *plan.rounds(["a"], 2.0, 40, 5, seed=0),
        *(plan.probe("a", n, 2.0, requests=40, least_s=10, seed=0) for n in range(5)),
        *plan.warmups(["a"], 2.0, 40, seed=1),
        *plan.rounds(["a"], 2.0, 40, 5, seed=1),
    ]
    assert len({replay.seed for replay in replays}) == len(replays)


def test_a_probe_lasts_long_enough_for_a_queue_to_grow() -> None:
    def requests(rate: float) -> int:
        return plan.probe("a", 0, rate, requests=40, least_s=15, seed=0).requests

    assert [requests(rate) for rate in (1.0, 10.0, 1e6)] == [40, 150, plan.MAX_PROBE_REQUESTS]
