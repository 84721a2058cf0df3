"""Every order of messages of a hand-off with its faults; docs/failures.md says what is covered."""

from __future__ import annotations

import logging
import os
import random

import pytest

from tests.support.explorer import explore, walk
from tests.support.handoff_model import FAULTS, HandoffWorld


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("kv_transfer.protocol.consumer").setLevel(logging.ERROR)


# With a second chunk everywhere, which takes minutes.
DEEP = bool(os.environ.get("PDSERVE_EXPLORE_DEEP"))


@pytest.mark.parametrize(
    ("faults", "kinds", "chunks", "is_pull"),
    [
        (1, FAULTS, 1 + DEEP, False),
        (2, ("kill_p", "lose"), 2, False),
        (2, ("kill_d", "lose"), 1 + DEEP, True),
        (2, ("kill_d", "silent"), 1 + DEEP, True),
    ],
)
def test_no_order_of_events_breaks_a_promise(
    faults: int, kinds: tuple[str, ...], chunks: int, is_pull: bool
) -> None:
    explored = explore(HandoffWorld(faults, kinds, chunks=chunks, is_pull=is_pull))
    assert explored.states > 5_000
    assert explored.ends > 1


@pytest.mark.parametrize("is_pull", [False, True])
def test_no_walk_with_four_faults_breaks_a_promise(is_pull: bool) -> None:
    for seed in range(2000):
        walk(HandoffWorld(4, FAULTS, chunks=3, is_pull=is_pull), random.Random(seed))
