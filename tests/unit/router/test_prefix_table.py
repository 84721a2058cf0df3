"""The tables of the prefix index, compiled and not: each a dict, and an index on each the same."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prefix import table as tables
from router.prefix.index import PrefixIndex
from router.prefix.table import ABSENT, SHARDS, DictTable, new_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.prefix._table import Table

    Make = Callable[[], Table | DictTable]

COMPILED = pytest.mark.skipif(
    tables.compiled is None, reason="the extension was not built: no C compiler at install"
)
WORD = 1 << 64
SECRET = 0x1234567890ABCDEF


def unmixed(mixed: int, secret: int = SECRET) -> int:
    """The hash of which _table.c, with this secret, makes `mixed`."""
    half = mixed * pow(0x9E3779B97F4A7C15, -1, WORD) % WORD
    return (half ^ half >> 32) * pow(secret, -1, WORD) % WORD


def crowded(shard: int) -> list[int]:
    """Hashes that all have the last home of a shard, whatever its size, and some the first."""
    end = (shard + 1) << 54
    return [unmixed(end - 1 - i) for i in range(100)] + [
        unmixed((shard << 54) + i) for i in range(20)
    ]


HASHES = [0, 1, WORD - 1, *crowded(0), *crowded(SHARDS - 1), *range(1 << 60, (1 << 60) + 40)]
SETS = range(5)
MAKES = [
    pytest.param(DictTable, id="dict"),
    pytest.param(lambda: tables.compiled.Table(SECRET), id="compiled", marks=COMPILED),
]
some_hashes = st.one_of(
    st.lists(st.sampled_from(HASHES), max_size=20),
    st.sampled_from((HASHES, HASHES[::2], HASHES[::-3], crowded(0)[:50], crowded(0)[20:])),
)
some_set = st.sampled_from((ABSENT, *SETS))
changes = st.tuples(some_hashes, st.one_of(st.just(ABSENT), some_set), some_set)
# By set; the last of `SETS` stays.
replacements = st.lists(some_set, min_size=len(SETS) - 1, max_size=len(SETS) - 1)


def words(*hashes: int) -> array[int]:
    return array("Q", hashes)


def same(table: Table | DictTable, held: dict[int, int]) -> None:
    """The table says what a dict says."""
    assert len(table) == len(held)
    runs = [(key, len(list(x))) for key, x in groupby(held.get(x, ABSENT) for x in HASHES)]
    start = 0
    for key, count in runs:
        assert table.run(words(*HASHES), start) == (start + count, key)
        start += count
    closed = sorted(held, key=lambda x: held[x])
    behind = {held[x]: end + 1 for end, x in enumerate(closed)}
    ends, sets, slots = table.runs(words(*closed, 1 << 61))
    assert (ends, sets) == (list(behind.values()), list(behind))
    assert len(slots) == len(sets)


@pytest.mark.parametrize("make", MAKES)
@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.one_of(changes, replacements), max_size=12))
def test_a_table_is_a_dict(make: Make, steps: list[Any]) -> None:
    table = make()
    held: dict[int, int] = {}
    for step in steps:
        if isinstance(step, tuple):
            hashes, old, new = step
            changed = [x for x in dict.fromkeys(hashes) if held.get(x, ABSENT) == old != new]
            held.update(dict.fromkeys(changed, new))
            start, end = 1, 1 + len(hashes)
            asked = words(unmixed(7), *hashes, unmixed(8))
            assert table.change(asked, start, end, old, new) == len(changed)
        else:
            instead = array("I", step)
            counts = [table.count(shard, instead) for shard in range(SHARDS)]
            for shard in range(SHARDS):
                table.replace(shard, instead)
            for key, new in enumerate((*step, SETS[-1])):
                moved = sum(x == key for x in held.values()) if new != key else 0
                assert sum(count.get(key, 0) for count in counts) == moved
            held = {x: (*step, SETS[-1])[key] for x, key in held.items()}
        held = {x: key for x, key in held.items() if key != ABSENT}
        same(table, held)


UPDATES = st.lists(st.sampled_from(HASHES[:12]), max_size=8)
WORKERS = 130  # three words of a mask
SOME_WORKERS = st.sampled_from((0, 1, 64, 129))


@COMPILED
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SOME_WORKERS, UPDATES, UPDATES, st.booleans()), max_size=20))
def test_an_index_is_the_same_on_both(
    steps: list[tuple[int, list[int], list[int], bool]],
) -> None:
    both = [
        PrefixIndex(9, max_sets=WORKERS + 2, table=table)
        for table in (DictTable(), tables.compiled.Table(SECRET))
    ]
    holders = [[index.join(f"w{i}") for i in range(WORKERS)] for index in both]
    for who, removed, stored, leaves in steps:
        seen = []
        for index, ours in zip(both, holders, strict=True):
            index.apply(ours[who], removed, stored)
            if leaves:
                index.leave(ours[who])
                ours[who] = index.join(f"w{who}")
            while index.needs_purge:
                index.purge()
            figures = (index.blocks, index.refused_blocks, index.distinct_sets)
            seen.append((figures, index.truncated_workers, index.lengths(HASHES[:12])))
        assert seen[0] == seen[1]


@COMPILED
def test_the_compiled_table_is_the_one_in_use() -> None:
    assert isinstance(new_table(), tables.compiled.Table)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.run(words(1), 1),
        lambda table: table.run(words(1), -1),
        lambda table: table.run(words(), 0),
        lambda table: table.change(words(1, 2), 1, 3, ABSENT, 0),
        lambda table: table.change(words(1, 2), -1, 1, ABSENT, 0),
        lambda table: table.change(words(1, 2), 2, 1, ABSENT, 0),
        lambda table: table.count(SHARDS, array("I")),
        lambda table: table.replace(-1, array("I")),
    ],
)
def test_what_is_not_there_cannot_be_asked_for(make: Make, call: Callable[[Any], object]) -> None:
    table = make()
    with pytest.raises(IndexError):
        call(table)
    assert len(table) == 0


@COMPILED
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda table: table.runs([1]), TypeError),
        (lambda table: table.runs(array("I", [1])), ValueError),
        (lambda table: table.run(b"12345678", 0), ValueError),
        (lambda table: table.change(words(1), 0, 1, ABSENT, -1), OverflowError),
        (lambda table: table.change(words(1), 0, 1, 1 << 32, 0), OverflowError),
        (lambda table: table.change(words(1), 0, 1, ABSENT, "0"), TypeError),
        (lambda table: table.count(0, words(1)), ValueError),
        (lambda table: table.tell(ABSENT + 1, b""), OverflowError),
        (lambda table: table.tell(0, "1"), TypeError),
    ],
)
def test_what_are_no_words_is_refused(
    call: Callable[[Any], object], error: type[Exception]
) -> None:
    table = tables.compiled.Table(SECRET)
    with pytest.raises(error):
        call(table)
    assert len(table) == 0


@COMPILED
def test_a_block_takes_few_bytes_and_gives_them_back() -> None:
    hashes = array("Q", Random(1).sample(range(1 << 60), 200_000))
    empty = sys.getsizeof(tables.compiled.Table(1))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        table = tables.compiled.Table(SECRET)
        assert table.change(hashes, 0, len(hashes), ABSENT, 3) == len(hashes)
        full = sys.getsizeof(table)
        traced = tracemalloc.get_traced_memory()[0] - before
        # 12 of an entry, at least 7 of 10 places taken, and the spare ones of a small shard.
        assert 12 * len(hashes) < full - empty < 20 * len(hashes)
        assert abs(traced - full) < 0.01 * full
        assert table.change(hashes, 0, len(hashes), 3, ABSENT) == len(hashes)
        assert sys.getsizeof(table) < full / 2
        del table
        assert tracemalloc.get_traced_memory()[0] - before < 10_000
    finally:
        tracemalloc.stop()


@COMPILED
def test_a_large_shard_is_mapped_and_unmapped() -> None:
    places = Random(1).sample(range(1 << 54), 40_000)
    hashes = array("Q", [unmixed((5 << 54) + place) for place in places])
    process, taken = psutil.Process(), []
    for _ in range(10):
        before = process.memory_info().vms
        table = tables.compiled.Table(SECRET)
        assert table.change(hashes, 0, len(hashes), ABSENT, 0) == len(hashes)
        assert process.memory_info().vms - before > 12 * len(hashes)
        del table
        taken.append(process.memory_info().vms)
    # One of them would be 480 kB and more.
    assert taken[-1] - taken[0] < 12 * len(hashes)


@COMPILED
def test_hashes_that_crowd_with_one_secret_do_not_with_another() -> None:
    hashes = array("Q", [unmixed(i) for i in range(2000)])
    shards = []
    for secret in (SECRET, SECRET ^ 2):
        table = tables.compiled.Table(secret)
        table.change(hashes, 0, len(hashes), ABSENT, 0)
        all_of = [table.count(shard, array("I", [1])) for shard in range(SHARDS)]
        shards.append(sum(1 for count in all_of if count))
    assert shards[0] == 1
    assert shards[1] > SHARDS / 2
