"""An answer that leaves a worker with its KV: the states of its handoff until it goes on."""

from __future__ import annotations

import pytest

from pdserve.errors import Unavailable, WorkerFailed
from pdserve.types import FinishReason, HandoffStyle
from router.ladder import LadderLimits
from tests.unit.router.test_router_handoff import CORRUPTED, LENGTH, STOP, Driver, leave

BUSY = Unavailable("the KV of the stream is not whole here")


@pytest.fixture
def decoding() -> Driver:
    """Two tokens of eight are there, the second from `d`."""
    driver = Driver()
    driver.pair()
    driver.tokens("p", 1, finish=LENGTH)
    driver.tokens("d", 2)
    return driver


def test_an_answer_goes_on_from_its_kv_and_repeats_nothing(decoding: Driver) -> None:
    assert decoding.export("d")
    assert decoding.handoff.goes_on(decoding.legs["d"], 3), "it goes on until its last delta"
    assert decoding.exported("d", 3) == ["take over after [1, 2, 3]"]
    decoding.live("d2", "d")
    assert decoding.tokens("d", 9) == [], "the old worker has said its last"
    assert decoding.tokens("d2", 4) == ["deliver [4]"]
    assert not decoding.handoff.legs[1].holds
    assert decoding.tokens("d2", 5, finish=STOP) == ["finish [5] stop"]
    assert decoding.handoff.tokens == [1, 2, 3, 4, 5]
    assert decoding.handoff.fallbacks == ["live_kv:moved"]


def test_it_can_leave_again_and_again_without_a_rung() -> None:
    driver = Driver(max_tokens=100, limits=LadderLimits(max_fallbacks=1))
    driver.whole("w0")
    driver.tokens("w0", 1)
    for number in range(5):
        assert driver.export(f"w{number}")
        driver.exported(f"w{number}", number + 1)
        driver.live(f"w{number + 1}", f"w{number}")
        driver.tokens(f"w{number + 1}", number + 2)
    assert driver.handoff.fallbacks == ["live_kv:moved"] * 5
    assert driver.lost("w5") == ["other_prefill after [1, 2, 3, 4, 5, 6] without w5"]


def test_what_cannot_be_exported_is_not(decoding: Driver) -> None:
    fresh = Driver()
    fresh.pair(style=HandoffStyle.CONCURRENT)
    assert not fresh.export("p")
    assert not fresh.export("d"), "decode has not begun"
    fresh.tokens("p", 1, finish=LENGTH)
    assert not fresh.export("d"), "its KV is on the way"
    assert not fresh.export("p")
    assert not decoding.export("p")
    assert not decoding.export("elsewhere")
    assert decoding.export("d")
    assert not decoding.export("d"), "it is leaving"
    assert leave(decoding, "d") is None, "it is leaving"
    decoding.exported("d", 2)
    decoding.live("d2", "d")
    assert leave(decoding, "d") is None, "its KV is on the way"
    assert leave(decoding, "d2") is None, "its KV is on the way"
    assert not decoding.export("d2"), "its KV is on the way"
    decoding.tokens("d2", 3)
    assert decoding.export("d2")
    last = Driver(max_tokens=3)
    last.whole("w")
    last.tokens("w", 1)
    last.tokens("w", 2)
    assert not last.export("w"), "one token is missing"


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_an_answer_that_ends_while_it_is_asked_for_has_ended(
    decoding: Driver, finish: FinishReason
) -> None:
    decoding.export("d")
    assert decoding.tokens("d", 3, finish=finish) == [f"finish [3] {finish}"]
    assert decoding.late() == []
    assert decoding.handoff.fallbacks == []


def test_a_refusal_means_prefill_and_no_failure(decoding: Driver) -> None:
    decoding.export("d")
    assert decoding.error("d", BUSY) == ["same_prefill p after [1, 2] without d"]
    decoding.pair("p", "d2")
    assert decoding.handoff.fallbacks == ["same_prefill:moved"]


def test_another_count_of_tokens_means_prefill_and_frees_the_blocks(decoding: Driver) -> None:
    decoding.export("d")
    assert decoding.exported("d", 3) == ["cancel d", "same_prefill p after [1, 2] without d"]
    assert decoding.legs["d"].holds, "the cancel is for blocks that are held"


def test_an_export_that_does_not_come_in_time_means_prefill(decoding: Driver) -> None:
    decoding.export("d")
    assert decoding.late() == ["cancel d", "same_prefill p after [1, 2] without d"]
    decoding.pair("p", "d2")
    assert decoding.exported("d", 2) == [], "too late"
    assert decoding.late() == []
    assert decoding.handoff.fallbacks == ["same_prefill:moved"]


def test_a_worker_that_dies_while_it_is_asked_is_one_that_failed(decoding: Driver) -> None:
    decoding.export("d")
    assert decoding.lost("d") == ["same_prefill p after [1, 2] without d"]
    decoding.pair("p", "d2")
    assert decoding.handoff.fallbacks == ["same_prefill:worker_failed"]


@pytest.mark.parametrize("how", ["lost", "failed", "corrupted"])
def test_kv_that_does_not_arrive_means_prefill_and_frees_the_blocks(
    decoding: Driver, how: str
) -> None:
    decoding.export("d")
    decoding.exported("d", 2)
    decoding.live("d2", "d")
    if how == "lost":
        actions, without = decoding.lost("d2"), "d2"
    elif how == "failed":
        actions, without = decoding.error("d2", WorkerFailed("dead")), "d2"
    else:
        actions, without = decoding.error("d2", CORRUPTED), "d"
    assert actions[0] == "cancel d", "the blocks that it holds"
    assert actions[-1].endswith(without)
    decoding.whole("w")
    assert decoding.tokens("w", 3, finish=STOP) == ["finish [3] stop"]
    assert decoding.handoff.fallbacks[0] == "live_kv:moved"
    assert len(decoding.handoff.fallbacks) == 2


@pytest.mark.parametrize(
    ("steps", "cancels"),
    [(0, ["cancel d"]), (1, ["cancel d"]), (2, ["cancel d", "cancel d2"]), (3, ["cancel d2"])],
)
def test_a_client_that_leaves_ends_what_is_left(
    decoding: Driver, steps: int, cancels: list[str]
) -> None:
    decoding.export("d")
    if steps > 0:
        decoding.exported("d", 2)
    if steps > 1:
        decoding.live("d2", "d")
    if steps > 2:
        decoding.tokens("d2", 3)
    assert decoding.abandon() == cancels
    assert decoding.late() == []
