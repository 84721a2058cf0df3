"""The receiving end's decisions, event by event and state by state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.messages import Chunk, Done, Grant
from kv_transfer.target import (
    DropLink,
    Failed,
    Place,
    Received,
    SendAck,
    SendCancel,
    SendGrant,
    TargetAction,
    TargetOutcome,
    TargetTable,
)
from pdserve.types import TransferReport

RECEIVE_S = 60.0
CANCEL_S = 5.0
GRANT = Grant("t", 0, 10, [20, 21, 22])
FIRST = Chunk("t", 0, 2, 200)
SECOND = Chunk("t", 2, 1, 100)
DONE = Done("t", [7], 0.5, 0.1)

Table = TargetTable[str]
Actions = list[TargetAction[str]]


def new_table() -> Table:
    return TargetTable(RECEIVE_S, CANCEL_S)


def take(table: Table, chunk: Chunk, now: float = 0.0, link: str = "L") -> list[int] | None:
    """The reader thread's part for a chunk."""
    place = table.begin_chunk(link, chunk)
    if place is not None:
        table.end_chunk(link, chunk, now, intact=True)
    return None if place is None else place.block_ids


def started(table: Table) -> None:
    assert table.start("r", [("L", GRANT, None)], 0.0) == [SendGrant("L", GRANT)]


def complete(table: Table) -> None:
    started(table)
    assert take(table, FIRST) == [20, 21]
    assert take(table, SECOND) == [22]


def cancelling(table: Table) -> None:
    started(table)
    table.cancel("t", "cancelled", 0.0)


def confused(table: Table) -> None:
    """A chunk has come out of order."""
    started(table)
    assert take(table, SECOND) is None


def fencing(table: Table) -> None:
    started(table)
    table.link_down("L", "gone")


def writing(table: Table) -> None:
    """The reader thread is inside a chunk when another thread closes the link."""
    started(table)
    assert table.begin_chunk("L", FIRST) == Place([20, 21], None)
    table.link_down("L", "gone")


def unknown(table: Table) -> None:
    pass


State = Callable[[Table], None]
# name → method and arguments
EVENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "start again": ("start", ("s", [("M", GRANT, None)], 1.0)),
    "cancel": ("cancel", ("t", "cancelled", 1.0)),
    "done": ("done", ("L", DONE, "shm")),
    "done elsewhere": ("done", ("M", DONE, "shm")),
    "fail": ("fail", ("L", "t", "no")),
    "fail elsewhere": ("fail", ("M", "t", "no")),
    "link down": ("link_down", ("L", "gone")),
    "other link down": ("link_down", ("M", "gone")),
    "fenced": ("fenced", ("L",)),
    "soon": ("tick", (2.0,)),
    "late": ("tick", (RECEIVE_S,)),
}


def happen(table: Table, event: str) -> Actions:
    """What the table asks for; methods that return nothing ask for nothing."""
    method, arguments = EVENTS[event]
    return getattr(table, method)(*arguments) or []


TWICE = Failed("s", "the transfer id was used twice")
REPORT = TransferReport(0.5, 0.1, 300, 3, "shm")
CANCEL = [SendCancel("L", "t")]
ACK = [SendAck("L", "t")]
DROP = [DropLink("L")]
ORDER = "chunk 2+1 where 0 was due"

# state → event → (what must be done, what is reported); an event not named here does neither.
TABLE: dict[State, dict[str, tuple[Actions, list[TargetOutcome]]]] = {
    unknown: {"start again": ([SendGrant("M", GRANT)], [])},
    started: {
        "start again": ([], [TWICE]),
        "cancel": ([*CANCEL], []),
        "done": ([*ACK], [Failed("r", "3 blocks did not come")]),
        "fail": ([], [Failed("r", "no")]),
        "late": ([*CANCEL], []),
    },
    complete: {
        "start again": ([], [TWICE]),
        "cancel": ([*CANCEL], []),
        "done": ([*ACK], [Received("r", (7,), REPORT)]),
        "fail": ([], [Failed("r", "no")]),
        "late": ([*CANCEL], []),
    },
    cancelling: {
        "start again": ([], [TWICE]),
        "done": ([*ACK], [Failed("r", "cancelled")]),
        "fail": ([], [Failed("r", "cancelled")]),
        "late": ([*DROP], []),
    },
    confused: {
        "start again": ([], [TWICE]),
        "done": ([*ACK], [Failed("r", ORDER)]),
        "fail": ([], [Failed("r", ORDER)]),
        "soon": ([*CANCEL], []),
        "late": ([*CANCEL], []),
    },
    fencing: {
        "start again": ([], [TWICE]),
        "done": ([*ACK], [Failed("r", "gone")]),
        "fail": ([], [Failed("r", "gone")]),
        "fenced": ([], [Failed("r", "gone")]),
    },
    writing: {
        "start again": ([], [TWICE]),
        "done": ([*ACK], [Failed("r", "gone")]),
        "fail": ([], [Failed("r", "gone")]),
    },
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", TABLE, ids=lambda s: s.__name__)
def test_every_event_in_every_state(state: State, event: str) -> None:
    table = new_table()
    state(table)
    actions = happen(table, event)
    assert (actions, table.take_outcomes()) == TABLE[state].get(event, ([], []))
    assert table.take_outcomes() == []


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", [s for s in TABLE if s is not unknown], ids=lambda s: s.__name__)
def test_whatever_happens_a_request_is_reported_once(state: State, event: str) -> None:
    table = new_table()
    state(table)
    happen(table, event)
    table.end_chunk("L", FIRST, 1.0, intact=True)
    table.link_down("L", "gone")
    table.fenced("L")
    outcomes = [o for o in table.take_outcomes() if o.request_id == "r"]
    assert len(outcomes) == 1
    assert len(table) == 0
    assert not table.uses("L")


def test_blocks_stay_until_the_reader_has_left_them() -> None:
    table = new_table()
    writing(table)
    table.fenced("L")
    assert table.uses("L")
    table.abort_chunk("L", FIRST)
    table.fenced("L")
    assert table.take_outcomes() == [Failed("r", "gone")]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk("t", 1, 1, 100),
        Chunk("t", 0, 4, 400),
        Chunk("t", 0, 0, 0),
        Chunk("t", 0, 2**60, 1),
        Chunk("t", 0, 2, 200, tokens=7),  # the grant has not said how large its blocks are
        Chunk("t", 2**60, 1, 1),
    ],
)
def test_a_chunk_that_is_not_due_is_thrown_away_and_ends_its_transfer(chunk: Chunk) -> None:
    table = new_table()
    started(table)
    assert take(table, chunk) is None
    assert take(table, FIRST) is None
    assert table.tick(0.0) == CANCEL
    table.fail("L", "t", "cancelled")
    (outcome,) = table.take_outcomes()
    assert isinstance(outcome, Failed)
    assert "where 0 was due" in outcome.reason


def test_a_chunk_again_is_not_due() -> None:
    table = new_table()
    started(table)
    take(table, FIRST)
    assert take(table, FIRST) is None


@pytest.mark.parametrize("state", [unknown, cancelling, fencing], ids=lambda s: s.__name__)
def test_a_chunk_that_nobody_waits_for_is_thrown_away(state: State) -> None:
    table = new_table()
    state(table)
    assert take(table, FIRST) is None


def test_a_chunk_from_another_link_is_thrown_away() -> None:
    table = new_table()
    started(table)
    assert take(table, FIRST, link="M") is None
    assert take(table, FIRST) == [20, 21]


def test_a_transfer_without_its_token_has_failed() -> None:
    table = new_table()
    complete(table)
    assert table.done("L", Done("t", [], 0.0, 0.0), "shm") == ACK
    assert table.take_outcomes() == [Failed("r", "no token")]


def test_a_transfer_of_no_blocks_brings_the_token() -> None:
    table = new_table()
    table.start("r", [("L", Grant("t", 3, 12, []), None)], 0.0)
    table.done("L", DONE, "tcp")
    assert table.take_outcomes() == [Received("r", (7,), TransferReport(0.5, 0.1, 0, 0, "tcp"))]


@pytest.mark.parametrize("sign", ["chunk", "alive", "alive elsewhere"])
def test_signs_of_life_put_the_timeout_off(sign: str) -> None:
    table = new_table()
    started(table)
    now = RECEIVE_S - 1
    if sign == "chunk":
        take(table, FIRST, now)
    else:
        table.alive("L" if sign == "alive" else "M", ["t", "u"], now)
    late = table.tick(RECEIVE_S)
    assert late == (CANCEL if sign == "alive elsewhere" else [])
    assert table.timeouts == len(late)


def test_an_unanswered_cancel_costs_the_link_and_all_that_it_carries() -> None:
    table = new_table()
    cancelling(table)
    table.start("s", [("L", Grant("u", 0, 4, [30]), None)], 0.0)
    table.start("q", [("M", Grant("v", 0, 4, [31]), None)], 0.0)
    assert table.tick(CANCEL_S - 1) == []
    assert table.tick(CANCEL_S) == DROP
    table.link_down("L", "the source did not answer in time")
    assert table.fencing() == {"L"}
    table.fenced("L")
    assert {o.request_id for o in table.take_outcomes()} == {"r", "s"}
    assert len(table) == 1
