"""The sending end with several readers: ranks of one target that all take KV from this rank."""

from __future__ import annotations

from itertools import permutations

import pytest

from kv_transfer.layout import PagePart
from kv_transfer.messages import Grant
from kv_transfer.protocol.plan import Shard
from kv_transfer.source import SourceTable
from kv_transfer.source_actions import PushChunk, Release, SendAlive, SendDone, SendFail
from tests.unit.kv_transfer.source_states import (
    ALIVE_S,
    BLOCKS,
    LEASE_S,
    WAIT_S,
    Actions,
    copy,
    end,
    expected,
)

RELEASE = Release("r")
HEAD_PAGE = 4 * 8
LINKS = ("K", "L", "M")
# The rank holds heads 0 to 2 of a source of one rank; each reader wants one of them.
SHARD = Shard(3, 32, 4)


def new_table() -> SourceTable[str]:
    return SourceTable(
        shard=SHARD, chunk_blocks=8, lease_s=LEASE_S, grant_wait_s=WAIT_S, alive_s=ALIVE_S
    )


def grant(link: str, *, readers: int = 3, heads: list[int] | None = None) -> Grant:
    head = LINKS.index(link)
    return Grant("t", 0, 10, [20, 21, 22], "", heads or [head, 1, 0], readers)


def chunk(link: str, generation: int = 0) -> PushChunk[str]:
    head = LINKS.index(link)
    part = PagePart(head * HEAD_PAGE, 0, HEAD_PAGE)
    return PushChunk(link, "t", generation, 0, BLOCKS, [20, 21, 22], part=part)


def fail(link: str, reason: str) -> SendFail[str]:
    return SendFail(link, "t", reason)


def granted(*links: str) -> SourceTable[str]:
    table = new_table()
    expected(table)
    for link in links:
        assert table.grant(link, grant(link), 0.0) == []
    return table


def sent(*links: str) -> SourceTable[str]:
    """Prefill has ended, and Done was said to these."""
    table = granted(*links)
    copy(table, table.progress("t", BLOCKS, 10, 0.0))
    copy(table, end(table))
    return table


def test_each_reader_gets_its_heads() -> None:
    table = granted(*LINKS)
    assert table.progress("t", BLOCKS, 10, 0.0) == [chunk(link) for link in LINKS]
    assert end(table) == [SendDone(link, "t", 0) for link in LINKS]


def test_a_reader_that_comes_late_gets_everything() -> None:
    table = sent("K")
    assert table.grant("L", grant("L"), 0.0) == [chunk("L"), SendDone("L", "t", 0)]


@pytest.mark.parametrize("order", list(permutations(LINKS)))
def test_blocks_are_held_until_the_last_reader_has_acknowledged(order: tuple[str, ...]) -> None:
    table = sent(*LINKS)
    for link in order[:-1]:
        assert table.ack(link, "t") == []
        assert table.ack(link, "t") == []  # said twice, it counts once
    assert table.ack(order[-1], "t") == [RELEASE]
    assert len(table) == 0


def test_a_reader_that_has_acknowledged_may_leave() -> None:
    table = sent(*LINKS)
    assert table.ack("K", "t") == []
    assert table.link_down("K") == []
    assert table.cancel("K", "t") == [fail("K", "cancelled")]
    assert [table.ack(link, "t") for link in ("L", "M")] == [[], [RELEASE]]


def test_readers_that_are_still_to_come_are_waited_for() -> None:
    table = sent("K", "L")
    assert [table.ack(link, "t") for link in ("K", "L")] == [[], []]
    assert len(table) == 1
    copy(table, table.grant("M", grant("M"), 0.0))
    assert table.ack("M", "t") == [RELEASE]


@pytest.mark.parametrize("who", LINKS)
@pytest.mark.parametrize("how", ["cancel", "link down"])
def test_what_one_reader_gives_up_is_given_up_for_all(who: str, how: str) -> None:
    table = sent(*LINKS)
    others = [link for link in LINKS if link != who]
    answer: Actions
    if how == "cancel":
        answer, reason = [fail(who, "cancelled")], "cancelled"
        actions = table.cancel(who, "t")
    else:
        answer, reason = [], "the decode worker went away"
        actions = table.link_down(who)
    assert actions == [*answer, *(fail(link, reason) for link in others), RELEASE]
    assert all(table.ack(link, "t") == [] for link in LINKS)
    assert len(table) == 0


@pytest.mark.parametrize("how", ["cancel", "link down", "time"])
def test_grants_that_came_early_are_given_up_together(how: str) -> None:
    table = new_table()
    for link in LINKS:
        assert table.grant(link, grant(link), 0.0) == []
    assert len(table) == 1
    told = {
        "cancel": lambda: table.cancel("L", "t")[1:],
        "link down": lambda: table.link_down("L"),
        "time": lambda: table.tick(WAIT_S),
    }[how]()
    assert {a.link for a in told if isinstance(a, SendFail)} == (
        set(LINKS) if how == "time" else {"K", "M"}
    )
    assert len(table) == 0
    assert [type(a) for a in table.grant("M", grant("M"), 0.0)] == [SendFail]
    expected(table)
    assert end(table) == [RELEASE]


def test_grants_that_came_early_are_all_served() -> None:
    table = new_table()
    for link in LINKS:
        table.grant(link, grant(link), 0.0)
    assert expected(table) == []
    assert table.progress("t", BLOCKS, 10, 0.0) == [chunk(link) for link in LINKS]


@pytest.mark.parametrize("early", [True, False])
def test_no_more_readers_are_taken_than_the_first_grant_said(early: bool) -> None:
    table = new_table()
    if not early:
        expected(table)
    assert table.grant("K", grant("K", readers=2), 0.0) == []
    before = [fail("K", "the transfer was granted before")]
    assert table.grant("K", grant("K", readers=2), 0.0) == before
    assert table.grant("L", grant("L", readers=2), 0.0) == []
    assert table.grant("M", grant("M", readers=2), 0.0) == [
        fail("M", "the transfer was granted before")
    ]


@pytest.mark.parametrize("readers", [0, 2])
def test_readers_that_disagree_about_their_number_are_refused(readers: int) -> None:
    table = granted("K")
    told = table.grant("L", grant("L", readers=readers), 0.0)
    assert told == [fail(link, f"{readers} readers, and 3 before") for link in ("K", "L")]
    assert end(table) == [RELEASE]


def test_heads_that_are_not_here_are_refused_by_name() -> None:
    table = new_table()
    expected(table)
    told = table.grant("K", grant("K", readers=1, heads=[2, 2, 0]), 0.0)
    assert told == [fail("K", "heads 2-3 are not held here (this rank holds 0-2)")]
    assert end(table) == [RELEASE]


def test_one_lease_is_for_all_readers() -> None:
    table = sent("K", "L")
    table.ack("K", "t")
    table.tick(LEASE_S - 1)
    assert table.tick(LEASE_S) == [fail("L", "the lease ran out"), RELEASE]
    assert table.expired_leases == 1


def test_a_release_waits_for_the_copies_to_every_reader() -> None:
    table = granted(*LINKS)
    table.progress("t", BLOCKS, 10, 0.0)
    assert table.begin_copy(chunk("K"))
    assert table.begin_copy(chunk("L"))
    assert table.copying_over("t") == ["K", "L"]
    end(table)
    assert RELEASE not in table.cancel("M", "t")
    assert not table.begin_copy(chunk("M"))
    assert table.end_copy(chunk("K"), 1.0, 0.1, copied=True) == []
    assert table.end_copy(chunk("L"), 1.0, 0.1, copied=False) == [RELEASE]
    assert len(table) == 0


def test_a_preemption_takes_each_reader_back_to_what_it_has() -> None:
    table = granted("K", "L")
    table.progress("t", BLOCKS, 10, 0.0)
    assert table.begin_copy(chunk("K"))
    table.preempt("t")
    table.end_copy(chunk("K"), 0.0, 0.1, copied=True)
    again = table.progress("t", BLOCKS, 10, 0.0)
    assert again == [chunk("L", generation=1)]
    assert table.begin_copy(chunk("L", generation=1))


def test_damage_at_one_reader_is_sent_again_to_it_alone() -> None:
    table = sent("K", "L", "M")
    (piece, done) = table.again("L", "t", 0, 0.0)
    assert isinstance(piece, PushChunk)
    assert (piece.link, piece.suspect) == ("L", True)
    assert done == SendDone("L", "t", 1)
    assert table.ack("L", "t") == []  # of the first time: it does not count
    copy(table, [piece, done])
    assert [table.ack(link, "t") for link in LINKS] == [[], [], [RELEASE]]


def test_every_reader_is_shown_signs_of_life() -> None:
    table = granted("K", "L")
    assert table.tick(ALIVE_S) == [SendAlive("K", "t"), SendAlive("L", "t")]
