"""Every order of events of a tier below the KV cache; docs/failures.md says what is covered.
Planted defects are found."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kv_transfer.vllm.tiers import TierConnector, TieredConnector
from tests.support.explorer import assert_finds, explore
from tests.support.tier_model import ModelCopies, TierWorld

if TYPE_CHECKING:
    from tests.support.explorer import Defect

# With more requests, which takes minutes.
DEEP = bool(os.environ.get("PDSERVE_EXPLORE_DEEP"))
WORLDS: list[tuple[tuple[str, ...], int, int, int, bool]] = [
    (("a", "+c", "a"), 1, 1, 1, True),
    (("ab", "+cd"), 2, 2, 0, True),
    (("a.b", "+cd"), 2, 2, 0, True),
    (("a.b", "+cd"), 2, 2, 1, False),
]
DEEPER: list[tuple[tuple[str, ...], int, int, int, bool]] = [
    (("a.b", "+cd"), 2, 2, 2, True),
    (("a.b", "+c.d", "ab"), 3, 2, 1, False),
    (("a.b", "+c.d", "ab"), 3, 2, 0, True),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
    monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.mark.parametrize(
    ("texts", "blocks", "chunks", "aborts", "is_async"), WORLDS + (DEEPER if DEEP else [])
)
def test_no_order_of_events_breaks_a_promise(
    texts: tuple[str, ...], blocks: int, chunks: int, aborts: int, is_async: bool
) -> None:
    world = TierWorld(texts, blocks=blocks, chunks=chunks, aborts=aborts, is_async=is_async)
    explored = explore(world)
    assert explored.states > 300
    assert explored.ends > 1


def waits_for_nothing(self: ModelCopies, job_ids: set[int]) -> None:
    """Return before the copies of these jobs."""


# The tier's stores are waited for, in the right order, also before KV of another worker arrives.
WAIT = (ModelCopies, "wait", waits_for_nothing)
ORDER = (TieredConnector, "handle_preemptions", MultiConnector.handle_preemptions)
FENCE = (TierConnector, "update_state_after_alloc", OffloadingConnector.update_state_after_alloc)


@pytest.mark.parametrize(
    ("defect", "texts", "is_async"),
    [
        (WAIT, ("a", "c"), True),
        (WAIT, ("a", "+c"), True),
        (ORDER, ("a", "+c"), True),
        (ORDER, ("a", "+c"), False),
        (FENCE, ("a", "+c"), True),
        (FENCE, ("a.b", "+cd"), False),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch,
    defect: Defect,
    texts: tuple[str, ...],
    is_async: bool,
) -> None:
    blocks = len(texts[0].replace(".", ""))
    world = TierWorld(texts, blocks=blocks, chunks=blocks, aborts=0, is_async=is_async)
    assert_finds(monkeypatch, defect, "the tier keeps b'c", world)
