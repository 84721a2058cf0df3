"""Which blocks of sessions are retained, and until when."""

from __future__ import annotations

import pytest

from workers.cache.retention import RetainedBlocks


def retained(most: int = 10, max_s: float = 60.0) -> RetainedBlocks:
    return RetainedBlocks(most, max_s)


def ended(table: RetainedBlocks) -> dict[str, int]:
    return {reason: count for reason, count in table.ended.items() if count}


def test_a_turn_is_retained_until_the_next_is_expected_and_not_longer_than_the_maximum() -> None:
    table = retained(max_s=60.0)
    assert table.retain([3, 2, 1], now=0.0, expected_s=5.0) == []
    table.retain([13, 12], now=0.0, expected_s=100.0)
    table.retain([23, 22], now=1.0, expected_s=0.0)  # not known
    assert table.blocks == 7
    assert table.expire(4.9) == []
    assert table.expire(5.0) == [3, 2, 1]
    assert table.expire(60.0) == [13, 12]
    assert 22 in table
    assert table.expire(61.0) == [23, 22]
    assert (table.blocks, ended(table)) == (0, {"expired": 3})


def test_a_block_of_two_sessions_is_released_with_the_last_one() -> None:
    table = retained()
    table.retain([3, 2, 1], now=0.0, expected_s=5.0)
    table.retain([13, 2, 1], now=0.0, expected_s=9.0)
    assert table.blocks == 4
    assert table.expire(5.0) == [3]
    assert table.expire(9.0) == [13, 2, 1]


def test_the_next_turn_ends_retention_and_a_request_with_a_part_of_the_prefix_does_not() -> None:
    table = retained()
    table.retain([3, 2, 1], now=0.0, expected_s=5.0)
    assert table.used(1) == table.used(2) == table.used(9) == []
    assert table.used(3) == [3, 2, 1]
    assert (table.blocks, ended(table)) == (0, {"returned": 1})


def test_a_turn_that_shares_no_used_block_replaces_the_one_before_it() -> None:
    table = retained()
    table.retain([3, 2, 1], now=0.0, expected_s=5.0)
    assert table.retain([5, 4, 3, 2, 1], now=1.0, expected_s=5.0) == []
    assert (table.blocks, ended(table)) == (5, {"returned": 1})
    assert table.expire(5.0) == []


def test_the_turns_that_ended_first_leave_when_the_budget_is_full() -> None:
    table = retained(most=6)
    table.retain([3, 2, 1], now=0.0, expected_s=50.0)
    table.retain([13, 12], now=1.0, expected_s=5.0)
    assert table.retain([23, 22, 21], now=2.0, expected_s=5.0) == [3, 2, 1]
    assert (table.blocks, ended(table)) == (5, {"budget": 1})


def test_a_turn_longer_than_the_budget_keeps_its_first_blocks() -> None:
    table = retained(most=2)
    table.retain([3, 2, 1], now=0.0, expected_s=5.0)
    assert [block in table for block in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("blocks", [[], [1]])
def test_nothing_is_retained_without_blocks_or_budget(blocks: list[int]) -> None:
    table = retained(most=0 if blocks else 10)
    assert table.retain(blocks, now=0.0, expected_s=5.0) == []
    assert (table.blocks, table.expire(100.0), ended(table)) == (0, [], {})


def test_evicted_blocks_are_forgotten_and_the_rest_stays_retained() -> None:
    table = retained()
    table.retain([3, 2, 1], now=0.0, expected_s=5.0)
    table.retain([13, 2, 1], now=0.0, expected_s=5.0)
    for block in (3, 2, 7):
        table.evicted(block)
    assert (table.blocks, ended(table)) == (2, {})
    assert table.used(1) == []  # the deepest block of the first one; the second has it too
    assert ended(table) == {"returned": 1}
    for block in (13, 1):
        table.evicted(block)
    assert (table.blocks, ended(table)) == (0, {"returned": 1, "pressure": 1})


class CountedBlock(int):
    """A block that counts how often one is looked up or compared."""

    count = 0

    def __hash__(self) -> int:
        CountedBlock.count += 1
        return int(self)

    def __eq__(self, other: object) -> bool:
        CountedBlock.count += 1
        return int(self) == other


@pytest.mark.parametrize("how", ["retain", "use"])
def test_a_turn_costs_the_same_whatever_number_of_sessions_share_its_prefix(how: str) -> None:
    prefix = [CountedBlock(x) for x in range(8, 0, -1)]
    costs = []
    for sessions in (2, 200):
        table = retained(most=1000)
        for number in range(sessions):
            table.retain([CountedBlock(100 + number), *prefix], 0.0, 1.0 + number)
        CountedBlock.count = 0
        if how == "retain":
            table.retain([CountedBlock(99), *prefix], 0.0, 1.0)
        else:
            for block in [*reversed(prefix), CountedBlock(100)]:
                table.used(block)
        costs.append(CountedBlock.count)
    assert costs[0] == costs[1]
