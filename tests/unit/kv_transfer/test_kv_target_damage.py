"""What the receiving end decides when a chunk does not have its digest."""

from __future__ import annotations

import pytest

from kv_transfer.messages import Again, Chunk, Done, Grant
from kv_transfer.target import (
    Failed,
    Place,
    Received,
    SendAck,
    SendAgain,
    SendCancel,
    TargetAction,
    TargetTable,
)
from pdserve.errors import TransferCorrupted, TransferFailed
from pdserve.types import TransferReport

RECEIVE_S = 60.0
GRANT = Grant("t", 0, 20, [20, 21, 22, 23, 24])
A, B, C = Chunk("t", 0, 2, 200), Chunk("t", 2, 2, 200), Chunk("t", 4, 1, 100)
DONE = Done("t", [7], 0.5, 0.1)
CANCEL = [SendCancel("L", "t")]
TWICE = "blocks 2+2 came damaged, and so did what came again"

Table = TargetTable[str]


def new_table() -> Table:
    table = Table(RECEIVE_S, 5.0)
    table.start("r", [("L", GRANT, None)], 0.0)
    return table


def take(table: Table, chunk: Chunk, *, intact: bool = True) -> list[TargetAction[str]] | None:
    """None where the chunk was thrown away."""
    if table.begin_chunk("L", chunk) is None:
        return None
    return table.end_chunk("L", chunk, 1.0, intact=intact)


def damaged() -> Table:
    """The second chunk came damaged, and was asked for again."""
    table = new_table()
    assert take(table, A) == []
    assert take(table, B, intact=False) == [SendAgain("L", "t", 2)]
    return table


def test_damaged_once_and_whole_again_is_received() -> None:
    table = damaged()
    assert take(table, B) == []
    assert take(table, C) == []
    assert table.done("L", DONE, "shm") == [SendAck("L", "t")]
    assert table.take_outcomes() == [
        Received("r", (7,), TransferReport(0.5, 0.1, 500, 5, "shm", digest_mismatches=1))
    ]


def test_what_was_on_its_way_meanwhile_is_thrown_away() -> None:
    """Chunks behind the damaged one, and the Done behind them."""
    table = damaged()
    assert take(table, C) is None
    assert table.done("L", DONE, "shm") == []
    assert table.take_outcomes() == []
    assert take(table, B) == []
    assert take(table, C) == []
    table.done("L", DONE, "shm")
    (outcome,) = table.take_outcomes()
    assert isinstance(outcome, Received)


def test_damaged_twice_fails_by_its_name_when_the_source_has_stopped() -> None:
    table = damaged()
    assert take(table, B, intact=False) == CANCEL
    assert take(table, C) is None
    assert table.take_outcomes() == []
    table.fail("L", "t", "cancelled")
    assert table.take_outcomes() == [Failed("r", TWICE, TransferCorrupted.code)]
    assert len(table) == 0


@pytest.mark.parametrize("first", [0, 1])
def test_another_chunk_than_asked_for_ends_the_transfer(first: int) -> None:
    table = damaged()
    assert take(table, Chunk("t", first, 1, 100)) is None
    assert table.tick(1.0) == CANCEL


def test_damage_of_what_nobody_wants_is_not_asked_for_again() -> None:
    table = new_table()
    assert table.begin_chunk("L", A) == Place([20, 21], None)
    table.cancel("t", "cancelled", 0.5)
    assert table.end_chunk("L", A, 1.0, intact=False) == []
    table.fail("L", "t", "cancelled")
    assert table.take_outcomes() == [Failed("r", "cancelled", TransferFailed.code)]


def test_a_link_that_goes_down_while_it_is_asked_for_again_fails_the_transfer() -> None:
    table = damaged()
    table.link_down("L", "gone")
    assert take(table, B) is None
    table.fenced("L")
    assert table.take_outcomes() == [Failed("r", "gone", TransferFailed.code)]


def test_a_link_that_goes_down_under_a_damaged_chunk_fails_the_transfer() -> None:
    table = new_table()
    assert table.begin_chunk("L", A) == Place([20, 21], None)
    table.link_down("L", "gone")
    assert table.end_chunk("L", A, 1.0, intact=False) == []
    table.fenced("L")
    assert table.take_outcomes() == [Failed("r", "gone", TransferFailed.code)]


def test_a_source_that_cannot_go_back_says_so() -> None:
    table = damaged()
    table.fail("L", "t", "the lease ran out")
    assert table.take_outcomes() == [Failed("r", "the lease ran out", TransferFailed.code)]


def test_what_was_asked_for_again_and_does_not_come_is_given_up() -> None:
    table = damaged()
    assert table.tick(RECEIVE_S) == []
    assert table.tick(RECEIVE_S + 1.0) == CANCEL
    # Cancelled: a Done ends it, be it the one from before.
    assert table.done("L", DONE, "shm") == [SendAck("L", "t")]
    assert table.take_outcomes() == [Failed("r", "no KV came in time", TransferFailed.code)]


def test_the_message_names_the_block() -> None:
    (action,) = take(new_table(), A, intact=False) or []
    assert isinstance(action, SendAgain)
    assert Again(action.transfer_id, action.first) == Again("t", 0)
