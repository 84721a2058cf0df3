"""Every order of events of a copy of cached KV; docs/failures.md says what is covered. Planted
defects are found."""

from __future__ import annotations

import logging
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.protocol import consumer
from router.attempt.copies import PrefixFetcher
from tests.support.copy_model import FAULTS, CopyWorld
from tests.support.explorer import KEEPS_HOLD, assert_finds, explore, walk
from tests.support.handoff_model import BLOCK

if TYPE_CHECKING:
    from tests.support.explorer import Defect

DEEP = bool(os.environ.get("PDSERVE_EXPLORE_DEEP"))
WORLDS: list[tuple[int, tuple[str, ...], int, bool]] = [
    (1, ("evict", "late"), 1, False),
    (1, ("kill_p", "kill_d", "damage"), 1, True),
    (2, ("evict",), 2, False),
]
DEEPER: list[tuple[int, tuple[str, ...], int, bool]] = [
    (1, FAULTS, 2, False),
    (1, FAULTS, 2, True),
    (2, ("evict", "kill_p", "lose"), 2, False),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("router.attempt.copies", "kv_transfer.protocol.consumer"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.mark.parametrize(
    ("faults", "kinds", "chunks", "is_pull"), WORLDS + (DEEPER if DEEP else [])
)
def test_no_order_of_events_breaks_a_promise(
    faults: int, kinds: tuple[str, ...], chunks: int, is_pull: bool
) -> None:
    explored = explore(CopyWorld(faults, kinds, chunks=chunks, is_pull=is_pull))
    assert explored.states > 200
    assert explored.ends > 1


def test_a_copy_without_faults_is_counted() -> None:
    for seed in range(20):
        world = CopyWorld(0, (), chunks=2, is_pull=bool(seed % 2))
        walk(world, random.Random(seed))
        assert world.counted == 2 * BLOCK


@pytest.mark.parametrize("is_pull", [False, True])
def test_no_walk_with_three_faults_breaks_a_promise(is_pull: bool) -> None:
    for seed in range(100):
        walk(CopyWorld(3, FAULTS, chunks=2, is_pull=is_pull), random.Random(seed))


_fetch = PrefixFetcher._fetch


async def counts_all(self: Any, request: Any, tokens: Any, reservation: Any) -> Any:
    """Count the planned tokens as copied also if the copy failed."""
    fetched = await _fetch(self, request, tokens, reservation)
    assert fetched is not None
    fetched.tokens = reservation.fetch.missing
    return fetched


def compares_nothing(*_: object) -> list[int]:
    return []


@pytest.mark.parametrize(
    ("defect", "kind", "said"),
    [
        ((PrefixFetcher, "_fetch", counts_all), "evict", "counted what is not cached"),
        ((consumer, "_differing", compares_nothing), "damage", "wrong KV"),
        (KEEPS_HOLD, "lose", "p keeps"),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch,
    defect: Defect,
    kind: str,
    said: str,
) -> None:
    assert_finds(monkeypatch, defect, said, CopyWorld(1, (kind,), chunks=1, is_pull=False))
