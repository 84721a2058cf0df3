"""The receiving end where one transfer comes in shares, from several ranks of the source."""

from __future__ import annotations

from itertools import permutations

import pytest

from kv_transfer.layout import PagePart
from kv_transfer.messages import Chunk, Done, Grant
from kv_transfer.target import (
    DropLink,
    Failed,
    Place,
    Received,
    SendAck,
    SendAgain,
    SendCancel,
    SendGrant,
    TargetTable,
)
from pdserve.errors import TransferCorrupted
from pdserve.types import TransferReport

CANCEL_S = 5.0
LINKS = ("K", "L", "M")
PARTS = {"K": PagePart(0, 0, 32), "L": PagePart(0, 32, 32), "M": PagePart(32, 64, 32)}
GRANT = Grant("t", 0, 8, [20, 21], "right")
CHUNK = Chunk("t", 0, 2, 100)
DONE = Done("t", [7], 0.5, 0.1)

Table = TargetTable[str]


def started() -> Table:
    table: Table = TargetTable(60.0, CANCEL_S)
    grants = [(link, GRANT, PARTS[link]) for link in LINKS]
    assert table.start("r", grants, 0.0) == [SendGrant(link, GRANT) for link in LINKS]
    return table


def take(table: Table, link: str) -> None:
    assert table.begin_chunk(link, CHUNK) == Place([20, 21], PARTS[link])
    assert table.end_chunk(link, CHUNK, 1.0, intact=True) == []


def arrive(table: Table, link: str, done: Done = DONE, transport: str = "shm") -> None:
    take(table, link)
    assert table.done(link, done, transport) == [SendAck(link, "t")]


@pytest.mark.parametrize("order", list(permutations(LINKS)))
def test_a_request_is_received_when_every_share_is(order: tuple[str, ...]) -> None:
    table = started()
    for link in order:
        assert table.take_outcomes() == []
        arrive(table, link)
    report = TransferReport(0.5, 0.1, 300, 2, "shm")
    assert table.take_outcomes() == [Received("r", (7,), report)]
    assert len(table) == 0


def test_its_report_is_of_all_shares() -> None:
    table = started()
    arrive(table, "K", Done("t", [7], 0.5, 0.1), "tcp")
    arrive(table, "L", Done("t", [7], 0.2, 0.3), "shm")
    arrive(table, "M", Done("t", [7], 0.1, 0.2), "tcp")
    (received,) = table.take_outcomes()
    assert isinstance(received, Received)
    assert received.report == TransferReport(0.5, 0.3, 300, 2, "shm+tcp")


@pytest.mark.parametrize("first", LINKS)
@pytest.mark.parametrize("how", ["fail", "link down", "out of order"])
def test_a_request_fails_once_when_its_last_share_has_ended(first: str, how: str) -> None:
    """Nothing is reported while anything can still be written."""
    table = started()
    others = [link for link in LINKS if link != first]
    if how == "fail":
        table.fail(first, "t", "no")
    elif how == "link down":
        table.link_down(first, "no")
        assert table.fencing() == {first}
    else:
        assert table.begin_chunk(first, Chunk("t", 1, 1, 50)) is None
        table.fail(first, "t", "cancelled")
    assert table.take_outcomes() == []
    # The others are called off, and answer.
    assert table.tick(1.0) == [SendCancel(link, "t", "right") for link in others]
    for link in others:
        assert table.begin_chunk(link, CHUNK) is None
        table.fail(link, "t", "cancelled")
    if how == "link down":
        assert table.take_outcomes() == []
        table.fenced(first)
    (outcome,) = table.take_outcomes()
    assert isinstance(outcome, Failed)
    assert outcome.request_id == "r"
    assert outcome.reason == ("chunk 1+1 where 0 was due" if how == "out of order" else "no")
    assert len(table) == 0


def test_shares_that_have_arrived_do_not_make_up_for_one_that_failed() -> None:
    table = started()
    arrive(table, "K")
    arrive(table, "M")
    table.fail("L", "t", "no")
    assert table.take_outcomes() == [Failed("r", "no")]


def test_a_share_that_is_being_written_is_waited_for() -> None:
    table = started()
    table.fail("K", "t", "no")
    table.fail("L", "t", "no")
    assert table.begin_chunk("M", CHUNK) is None
    assert table.tick(1.0) == [SendCancel("M", "t", "right")]
    table.link_down("M", "gone")
    assert table.take_outcomes() == []
    table.fenced("M")
    assert table.take_outcomes() == [Failed("r", "no")]


def test_a_cancel_goes_to_every_source_rank_and_each_may_cost_its_link() -> None:
    table = started()
    arrive(table, "K")
    assert table.cancel("t", "cancelled", 0.0) == [
        SendCancel(link, "t", "right") for link in ("L", "M")
    ]
    table.fail("L", "t", "cancelled")
    assert table.tick(CANCEL_S) == [DropLink("M")]
    table.link_down("M", "the source did not answer in time")
    table.fenced("M")
    assert table.take_outcomes() == [Failed("r", "cancelled")]


def test_no_progress_of_one_share_is_a_timeout_of_the_transfer() -> None:
    table = started()
    take(table, "K")
    table.alive("L", ["t"], 50.0)
    assert table.tick(60.5) == [SendCancel(link, "t", "right") for link in LINKS]
    assert table.timeouts == 1


def test_damage_twice_in_one_share_outweighs_how_the_others_end() -> None:
    table = started()
    for expected in ([SendAgain("L", "t", 0)], [SendCancel(x, "t", "right") for x in LINKS]):
        assert table.begin_chunk("L", CHUNK) is not None
        assert table.end_chunk("L", CHUNK, 1.0, intact=False) == expected
    for link in LINKS:
        table.fail(link, "t", "cancelled")
    (outcome,) = table.take_outcomes()
    assert isinstance(outcome, Failed)
    assert outcome.code == TransferCorrupted.code
    assert "came damaged" in outcome.reason


def test_ranks_that_tell_different_tokens_are_not_believed() -> None:
    table = started()
    arrive(table, "K")
    arrive(table, "L", Done("t", [8], 0.5, 0.1))
    table.fail("M", "t", "cancelled")
    (outcome,) = table.take_outcomes()
    assert isinstance(outcome, Failed)
    assert "disagree" in outcome.reason
