"""Short explorations of the hand-off, one kind of fault each; tests/slow has long ones. Planted
defects are found."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.protocol import consumer, producer
from router.attempt import handoff, recovery
from tests.support.explorer import KEEPS_HOLD, assert_finds, explore, walk
from tests.support.handoff_model import FAULTS, HandoffWorld

if TYPE_CHECKING:
    from tests.support.explorer import Defect

# A ping follows a death, so `silent` needs another fault before it.
QUICK = tuple(x for x in FAULTS if x not in ("leave", "kill_router", "break_p", "silent"))


@pytest.mark.parametrize("kind", QUICK)
def test_no_order_of_events_with_one_fault_breaks_a_promise(kind: str) -> None:
    explored = explore(HandoffWorld(1, (kind,), chunks=1, is_pull=True))
    assert explored.ends > 1


@pytest.mark.parametrize("is_pull", [False, True])
def test_no_walk_with_several_faults_breaks_a_promise(is_pull: bool) -> None:
    for seed in range(100):
        walk(HandoffWorld(3, FAULTS, chunks=3, is_pull=is_pull), random.Random(seed))


def no_comparison(*_: object) -> list[int]:
    return []


def forgets_early(self: Any, *_: object) -> tuple[()]:
    """Drop what decode sends before the first token."""
    return ()


def gives_up(self: Any, error: Any, facts: Any) -> Any:
    """Fail if the first step finds no workers."""
    return recovery.GiveUp(error)


def releases_at_once(self: Any, transfer: Any) -> list[Any]:
    """Release blocks under a copy."""
    if transfer.ended_at is None:
        return []
    self._transfers.pop(transfer.transfer_id, None)
    return [producer.Release(transfer.request_id)] if transfer.is_held else []


@pytest.mark.parametrize(
    ("defect", "kind", "said"),
    [
        ((consumer, "_differing", no_comparison), "damage", "wrong KV"),
        ((handoff.Handoff, "_on_early", forgets_early), "double", "has no end"),
        (KEEPS_HOLD, "lose", "p keeps"),
        ((recovery.Recovery, "refused", gives_up), "kill_p", "the answer failed"),
        ((producer.Producer, "_drop", releases_at_once), "leave", "released under a copy"),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch,
    defect: Defect,
    kind: str,
    said: str,
) -> None:
    assert_finds(monkeypatch, defect, said, HandoffWorld(1, (kind,), chunks=2, is_pull=False))
