"""What lies ready before anybody asks for it, at the sending end: published once, and withdrawn
before its blocks can be anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.messages import Grant
from kv_transfer.source_actions import Publish, PushChunk, Release, SendDone, SendFail, Withdraw
from tests.unit.kv_transfer.source_states import (
    BEFORE,
    BLOCKS,
    EVENTS,
    GRANT,
    LEASE_S,
    RELEASE,
    Table,
    early,
    end,
    expected,
    new_table,
)

PUBLISH, WITHDRAW = Publish("t", 10, BLOCKS, (7,)), Withdraw("t")


def published() -> Table:
    table = new_table(publish_blocks=3)
    expected(table)
    assert table.progress("t", BLOCKS, 10, 0.0) == []
    assert end(table) == [PUBLISH]
    return table


def test_a_prefill_that_ends_before_anybody_asks_is_published_and_freed_when_taken() -> None:
    table = published()
    assert table.taken("t") == [WITHDRAW, RELEASE]
    assert len(table) == 0
    assert table.taken("t") == []
    assert table.grant("L", GRANT, 1.0) == [SendFail("L", "t", "finished")]


@pytest.mark.parametrize(
    "why",
    ["too many blocks", "granted", "granted early", "aborted", "nothing computed", "no token"],
)
def test_what_cannot_be_taken_is_not_published(why: str) -> None:
    table = new_table(publish_blocks=2 if why == "too many blocks" else 3)
    if why == "granted early":
        early(table)
    expected(table)
    if why == "granted":
        table.grant("L", GRANT, 0.0)
    if why != "nothing computed":
        table.progress("t", BLOCKS, 10, 0.0)
    tokens = () if why == "no token" else (7,)
    actions = table.end("t", tokens, 0.0, held=why != "aborted")
    assert not [a for a in actions if isinstance(a, Publish)]
    assert table.taken("t") == []


@pytest.mark.parametrize("event", ["cancel", "lease over", "expect"])
def test_it_is_withdrawn_before_its_blocks_are_released(event: str) -> None:
    table = published()
    actions = EVENTS[event](table)
    assert [a for a in actions if not isinstance(a, SendFail)] == [WITHDRAW, RELEASE]
    assert table.taken("t") == []


def test_it_is_withdrawn_when_the_request_is_given_up() -> None:
    assert published().release("t") == [WITHDRAW, RELEASE]


@pytest.mark.parametrize("event", ["ack", "link down", "progress", "end held", "end aborted"])
def test_what_does_not_concern_it_leaves_it_there(event: str) -> None:
    table = published()
    assert EVENTS[event](table) == []
    assert table.taken("t") == [WITHDRAW, RELEASE]


def test_a_grant_takes_it_back_and_is_served() -> None:
    """From then on it is that reader's: who took it meanwhile is too late, and asks like others."""
    table = published()
    assert table.grant("L", GRANT, 1.0) == [
        WITHDRAW,
        PushChunk("L", "t", 0, 0, BLOCKS, [20, 21, 22]),
        SendDone("L", "t", 0),
    ]
    assert table.taken("t") == []
    assert table.grant("M", GRANT, 1.0) == [replace(BEFORE, link="M")]
    assert len(table) == 1
    assert [a for a in table.tick(LEASE_S) if isinstance(a, Release)] == [RELEASE]


def test_a_grant_that_does_not_fit_takes_it_back_and_fails() -> None:
    table = published()
    actions = table.grant("L", Grant("t", 0, 10, [20]), 1.0)
    assert actions[0] == WITHDRAW
    assert actions[-1] == RELEASE
    assert isinstance(actions[1], SendFail)
