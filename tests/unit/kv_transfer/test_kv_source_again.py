"""What the sending end decides when its target asks for a chunk again."""

from __future__ import annotations

import pytest

from kv_transfer.messages import Grant
from kv_transfer.source_actions import PushChunk, Release, SendDone, SendFail
from tests.unit.kv_transfer.source_states import (
    BLOCKS,
    LEASE_S,
    RELEASE,
    Actions,
    Table,
    cancelled,
    copy,
    early,
    end,
    expected,
    fail,
    new_table,
    released,
    unknown,
)

GRANT = Grant("t", 0, 12, [20, 21, 22])
FROM, TO = dict(enumerate(BLOCKS)), dict(enumerate(GRANT.block_ids))


def chunk(generation: int, first: int, *, suspect: bool = True) -> PushChunk[str]:
    """One of one block."""
    return PushChunk("L", "t", generation, first, [FROM[first]], [TO[first]], suspect)


def table_with(ready_tokens: int) -> tuple[Table, Actions]:
    """A table that pushes block by block, and the pushes so far."""
    table = new_table(chunk_blocks=1)
    table.expect("t", "r", 0.0)
    table.grant("L", GRANT, 0.0)
    return table, table.progress("t", BLOCKS, ready_tokens, 0.0)


def sent() -> Table:
    """Everything went, Done too."""
    table, pushes = table_with(12)
    copy(table, pushes)
    copy(table, end(table))
    return table


def test_all_from_the_block_on_goes_again_and_done_behind_it() -> None:
    table = sent()
    pushes = table.again("L", "t", 1, 1.0)
    assert pushes == [chunk(1, 1), chunk(1, 2), SendDone("L", "t", 1)]
    assert table.ack("L", "t") == [], "an Ack before the second Done is not to be believed"
    copy(table, pushes)
    assert table.ack("L", "t") == [RELEASE]


def test_in_the_middle_what_is_queued_is_dropped_and_queued_anew() -> None:
    table, pushes = table_with(8)
    copy(table, pushes[:1])
    again = table.again("L", "t", 0, 1.0)
    assert again == [chunk(1, 0), chunk(1, 1)]
    assert isinstance(pushes[1], PushChunk)
    assert not table.begin_copy(pushes[1])
    copy(table, again)
    assert table.progress("t", BLOCKS, 12, 2.0) == [chunk(1, 2)]
    assert end(table) == [SendDone("L", "t", 1)]


def test_a_copy_that_runs_meanwhile_does_not_count() -> None:
    table, pushes = table_with(8)
    copy(table, pushes[:1])
    running = pushes[1]
    assert isinstance(running, PushChunk)
    assert table.begin_copy(running)
    again = table.again("L", "t", 0, 1.0)
    assert table.end_copy(running, 1.0, 0.1, copied=True) == []
    table.preempt("t")
    assert not any(table.begin_copy(p) for p in again if isinstance(p, PushChunk))
    assert table.progress("t", BLOCKS, 8, 2.0) == [chunk(2, 0), chunk(2, 1)]


def test_a_chunk_may_be_asked_for_before_its_copy_has_returned() -> None:
    """The target has it as soon as its message is out."""
    table, pushes = table_with(4)
    assert isinstance(pushes[0], PushChunk)
    assert table.begin_copy(pushes[0])
    again = table.again("L", "t", 0, 1.0)
    assert again == [chunk(1, 0)]
    assert table.end_copy(pushes[0], 1.0, 0.1, copied=True) == []
    copy(table, again)
    assert table.progress("t", BLOCKS, 8, 2.0) == [chunk(1, 1)]


def test_blocks_that_were_taken_away_go_again_when_they_are_computed_again() -> None:
    table, pushes = table_with(8)
    copy(table, pushes)
    table.preempt("t")
    assert table.again("L", "t", 1, 1.0) == []
    assert table.progress("t", BLOCKS, 4, 2.0) == []
    assert table.progress("t", BLOCKS, 12, 3.0) == [chunk(2, 1), chunk(2, 2)]


@pytest.mark.parametrize("first", [2, 3, 2**60])
def test_asked_again_for_what_was_not_sent_the_transfer_ends(first: int) -> None:
    table, pushes = table_with(12)
    copy(table, pushes[:2])
    assert table.again("L", "t", first, 1.0) == [
        fail(f"asked again for block {first}, not sent"),
    ]
    assert end(table) == [RELEASE]


def test_asked_again_twice_the_transfer_ends() -> None:
    table = sent()
    copy(table, table.again("L", "t", 0, 1.0))
    assert table.again("L", "t", 0, 2.0) == [fail("asked again twice"), RELEASE]
    assert len(table) == 0


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (unknown, "unknown transfer"),
        (early, "unknown transfer"),
        (expected, "unknown transfer"),
        (cancelled, "cancelled"),
        (released, "finished"),
    ],
    ids=lambda s: getattr(s, "__name__", s),
)
def test_of_a_transfer_that_is_not_its_own_nothing_comes_again(state: object, reason: str) -> None:
    table = new_table()
    assert callable(state)
    state(table)
    before = len(table)
    assert table.again("L", "t", 0, 1.0) == [fail(reason)]
    assert len(table) == before


def test_over_another_link_nothing_comes_again_and_nothing_is_disturbed() -> None:
    table = sent()
    assert table.again("M", "t", 0, 1.0) == [fail("unknown transfer", "M")]
    assert table.ack("L", "t") == [RELEASE]


@pytest.mark.parametrize("how", ["cancel", "link down", "lease"])
def test_what_goes_again_can_be_given_up(how: str) -> None:
    table = sent()
    pushes = table.again("L", "t", 0, 1.0)
    assert isinstance(pushes[0], PushChunk)
    assert table.begin_copy(pushes[0])
    match how:
        case "cancel":
            actions = table.cancel("L", "t")
        case "link down":
            actions = table.link_down("L")
        case _:
            actions = table.tick(LEASE_S)
    assert not any(isinstance(a, Release) for a in actions), "released under a copy"
    assert any(isinstance(a, SendFail) for a in actions) == (how != "link down")
    assert table.end_copy(pushes[0], 2.0, 0.1, copied=how != "link down") == [RELEASE]
    assert len(table) == 0
