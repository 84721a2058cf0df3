"""By how much running streams were held up lately, as far as the router placed it."""

from __future__ import annotations

import math

import pytest

from router.cost.stalls import Stalls


def test_what_held_streams_up_fades_as_they_end() -> None:
    stalls = Stalls()
    assert stalls.held_s("d0", 1.0, 0.0) == 0.0
    stalls.add("d0", 0.2, 1.0, 0.0)
    stalls.add("d0", 0.1, 1.0, 0.0)
    assert stalls.held_s("d0", 1.0, 0.0) == pytest.approx(0.3)
    assert stalls.held_s("d0", 1.0, 2.0) == pytest.approx(0.3 * math.exp(-2))
    stalls.add("d0", 0.1, 1.0, 2.0)
    assert stalls.held_s("d0", 1.0, 2.0) == pytest.approx(0.1 + 0.3 * math.exp(-2))
    # Who lives longer was held up by more of it; another worker's streams by none.
    assert stalls.held_s("d0", 4.0, 3.0) > stalls.held_s("d0", 1.0, 3.0)
    assert stalls.held_s("d1", 1.0, 2.0) == 0.0
    # Streams that end at once, and a clock that stands still or jumps, do no harm.
    assert stalls.held_s("d0", 0.0, 2.0) == 0.0
    assert stalls.held_s("d0", 1.0, 1.0) == stalls.held_s("d0", 1.0, 2.0)
    stalls.forget("d0")
    stalls.forget("d0")
    assert len(stalls) == 0


def test_the_mean_answer_is_that_of_the_model_and_follows_it() -> None:
    stalls = Stalls()
    before = stalls.gaps("demo")
    assert before >= 1
    for _ in range(4):
        stalls.answered("demo", 10)
        stalls.answered("demo", 30)
    assert stalls.gaps("demo") == pytest.approx(20)
    assert stalls.gaps("other") == before
    for _ in range(400):
        stalls.answered("demo", 0)
    # Somebody decodes, so there is a gap.
    assert stalls.gaps("demo") == 1
