"""What the sending end does over more than one event."""

from __future__ import annotations

import pytest

from kv_transfer.messages import Grant
from kv_transfer.source import MAX_EARLY_GRANTS, MAX_TOMBSTONES
from kv_transfer.source_actions import PushChunk, Release, SendAlive, SendDone, SendFail
from tests.unit.kv_transfer.source_states import (
    ALIVE_S,
    BLOCKS,
    CHUNK,
    EVENTS,
    EXPIRED,
    GRANT,
    LEASE_S,
    RELEASE,
    TWICE,
    WAIT_S,
    computed,
    copying,
    early,
    end,
    expected,
    fail,
    granted,
    new_table,
    pushed,
)


def test_a_copy_that_runs_puts_the_release_off() -> None:
    for event in ("cancel", "link down"):
        table = new_table()
        copying(table)
        end(table)
        assert RELEASE not in EVENTS[event](table)
        assert len(table) == 1
        assert table.end_copy(CHUNK, 1.0, 0.5, copied=event == "cancel") == [RELEASE]
        assert len(table) == 0


def test_chunks_of_a_closed_transfer_are_not_copied() -> None:
    table = new_table()
    chunks = computed(table)
    table.cancel("L", "t")
    assert isinstance(chunks[0], PushChunk)
    assert not table.begin_copy(chunks[0])


def test_done_of_a_closed_transfer_is_not_sent() -> None:
    table = new_table()
    pushed(table)
    done = end(table)[0]
    assert isinstance(done, SendDone)
    table.cancel("L", "t")
    assert table.done_figures(done, 1.0) is None


def test_done_says_the_tokens_and_what_the_transfer_cost() -> None:
    table = new_table()
    pushed(table)
    done = end(table, 4.0)[0]
    assert isinstance(done, SendDone)
    assert table.done_figures(done, 6.0) == ([7], 0.5, 2.0)


@pytest.mark.parametrize("before", [True, False])
def test_a_grant_counts_before_and_after_the_engine_expects_it(before: bool) -> None:
    table = new_table()
    steps = [early, expected] if before else [expected, early]
    for step in steps:
        assert step(table) == []
    assert table.progress("t", BLOCKS, 10, 0.0) == [CHUNK]


def test_blocks_are_pushed_as_they_fill_in_pieces_and_the_partial_one_last() -> None:
    table = new_table(chunk_blocks=2)
    expected(table)
    table.grant("L", Grant("t", 1, 18, [30, 31, 32, 33]), 0.0)
    blocks = [10, 11, 12, 13, 14]
    assert table.progress("t", blocks[:1], 4, 0.0) == []
    assert table.progress("t", blocks[:3], 11, 0.0) == [PushChunk("L", "t", 0, 0, [11], [30])]
    assert table.progress("t", blocks, 18, 0.0) == [
        PushChunk("L", "t", 0, 1, [12, 13], [31, 32]),
        PushChunk("L", "t", 0, 3, [14], [33]),
    ]
    assert end(table) == [SendDone("L", "t", 0)]


def test_a_grant_of_no_blocks_asks_for_the_token_alone() -> None:
    table = new_table()
    expected(table)
    assert table.grant("L", Grant("t", 3, 12, []), 0.0) == []
    table.progress("t", BLOCKS, 12, 0.0)
    assert end(table) == [SendDone("L", "t", 0)]


@pytest.mark.parametrize(
    "grant",
    [
        Grant("t", 0, 10, [20, 21]),
        Grant("t", 0, 10, [20, 21, 22, 23]),
        Grant("t", 1, 10, [20, 21, 22]),
        Grant("t", 4, 10, []),
        Grant("t", 2**60, 10, [20]),
        Grant("t", 0, 2**60, [20]),
        Grant("t", 0, 0, [20]),
    ],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_a_grant_whose_numbers_disagree_is_refused(grant: Grant, ahead: bool) -> None:
    table = new_table()
    actions = table.grant("L", grant, 0.0) if ahead else []
    actions += table.expect("t", "r", 0.0)
    actions += [] if ahead else table.grant("L", grant, 0.0)
    assert len(actions) == 1
    assert isinstance(actions[0], SendFail)
    assert "blocks were granted where" in actions[0].reason
    assert table.progress("t", BLOCKS, 10, 0.0) == []
    assert end(table) == [RELEASE]


def test_a_grant_for_more_tokens_than_are_computed_is_refused_when_prefill_ends() -> None:
    table = new_table()
    expected(table)
    table.grant("L", Grant("t", 0, 13, [20, 21, 22, 23]), 0.0)
    assert table.progress("t", BLOCKS, 10, 0.0) == [PushChunk("L", "t", 0, 0, [10, 11], [20, 21])]
    assert end(table) == [fail("13 tokens were granted and 10 computed"), RELEASE]


def test_tokens_that_lie_in_no_block_are_not_sent() -> None:
    table = new_table()
    granted(table)
    assert table.progress("t", BLOCKS[:2], 10, 0.0) == [
        PushChunk("L", "t", 0, 0, [10, 11], [20, 21])
    ]
    assert end(table) == [fail("10 tokens were granted and 8 computed"), RELEASE]


def test_after_a_preemption_only_what_was_not_copied_is_pushed_again() -> None:
    table = new_table(chunk_blocks=1)
    granted(table)
    first, second, third = table.progress("t", BLOCKS, 10, 0.0)
    assert isinstance(first, PushChunk)
    assert isinstance(second, PushChunk)
    assert isinstance(third, PushChunk)
    assert table.begin_copy(first)
    table.end_copy(first, 0.0, 0.1, copied=True)
    assert table.begin_copy(second)
    table.preempt("t")
    assert table.copying_over("t") == ["L"]
    table.end_copy(second, 0.0, 0.1, copied=True)
    assert table.copying_over("t") == []
    assert not table.begin_copy(third)
    assert table.progress("t", [40, 41, 42], 10, 0.0) == [PushChunk("L", "t", 1, 2, [42], [22])]
    assert end(table) == [SendDone("L", "t", 1)]


def test_nothing_is_pushed_between_a_preemption_and_the_tokens_computed_again() -> None:
    table = new_table(chunk_blocks=1)
    granted(table)
    table.progress("t", BLOCKS, 8, 0.0)
    table.preempt("t")
    assert table.progress("t", [40], 3, 0.0) == []
    assert table.progress("t", [40], 4, 0.0) == [PushChunk("L", "t", 1, 0, [40], [20])]


def test_a_grant_after_a_preemption_is_served_from_what_is_computed_again() -> None:
    table = new_table()
    expected(table)
    table.progress("t", BLOCKS, 10, 0.0)
    table.preempt("t")
    assert table.grant("L", GRANT, 0.0) == []
    assert table.progress("t", [40, 41, 42], 10, 0.0) == [
        PushChunk("L", "t", 0, 0, [40, 41, 42], [20, 21, 22])
    ]


def test_a_copy_that_broke_off_ends_its_transfer() -> None:
    table = new_table()
    copying(table)
    assert table.end_copy(CHUNK, 0.0, 0.1, copied=False) == [fail("a copy failed")]
    assert end(table) == [RELEASE]


def test_an_id_used_twice_serves_neither_request() -> None:
    table = new_table()
    granted(table)
    assert table.expect("t", "s", 1.0) == [TWICE]
    assert end(table, request_id="s") == [Release("s")]
    assert len(table) == 1
    assert end(table) == [RELEASE]
    assert len(table) == 0


@pytest.mark.parametrize("word", ["cancel", "link down", "lease over"])
def test_a_request_that_nobody_waits_for_any_more_is_released_as_it_ends(word: str) -> None:
    """The word that nothing will be taken may come before the engine takes the request in."""
    table = new_table()
    early(table)
    EVENTS[word](table)
    assert len(table) == 0
    assert table.expect("t", "r", 50.0) == []
    assert end(table, 51.0) == [RELEASE]


def test_the_lease_starts_when_prefill_ends_and_again_with_each_piece_taken() -> None:
    table = new_table(chunk_blocks=1)
    granted(table)
    chunks = table.progress("t", BLOCKS, 10, 0.0)
    end(table, 100.0)
    for i, chunk in enumerate(chunks):
        assert isinstance(chunk, PushChunk)
        now = 100.0 + (i + 1) * (LEASE_S - 1)
        assert not [a for a in table.tick(now) if not isinstance(a, SendAlive)]
        assert table.begin_copy(chunk)
        table.end_copy(chunk, now, 0.1, copied=True)
    last = 100.0 + 3 * (LEASE_S - 1) + LEASE_S
    assert table.expired_leases == 0
    assert table.tick(last) == [EXPIRED, RELEASE]
    assert table.expired_leases == 1


def test_a_lease_that_ends_inside_a_copy_counts_once_and_waits_for_it() -> None:
    table = new_table()
    copying(table)
    end(table)
    assert table.tick(50.0) == [EXPIRED]
    assert table.tick(60.0) == []
    assert table.expired_leases == 1
    assert table.end_copy(CHUNK, 61.0, 0.1, copied=True) == [RELEASE]


def test_granted_transfers_show_signs_of_life() -> None:
    table = new_table()
    granted(table)
    assert table.tick(ALIVE_S - 1) == []
    assert table.tick(ALIVE_S) == [SendAlive("L", "t")]
    assert table.tick(ALIVE_S + 1) == []
    table.cancel("L", "t")
    assert table.tick(99.0) == []


def test_what_is_remembered_of_strangers_is_bounded() -> None:
    table = new_table()
    for i in range(MAX_EARLY_GRANTS + 3):
        refused = table.grant("L", Grant(f"g{i}", 0, 4, [1]), 0.0)
        assert bool(refused) == (i >= MAX_EARLY_GRANTS)
    assert len(table) == MAX_EARLY_GRANTS
    assert len(table.tick(WAIT_S)) == MAX_EARLY_GRANTS
    assert len(table) == 0
    for i in range(2 * MAX_TOMBSTONES):
        table.cancel("L", f"c{i}")
    assert len(table) == 0
    assert len(table._tombstones) == MAX_TOMBSTONES
