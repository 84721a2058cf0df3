"""Which slots a source may fill: every grant is used once, and a link that broke gives none back
before its source can write no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import ProtocolError
from kv_transfer.ipc.credits import MAX_GRANTED, ChunkCredits, Quarantine


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_a_chunk_in_any_parts_uses_every_grant_and_covers_every_unit(
    sizes: list[int], data: st.DataObject
) -> None:
    slots = ChunkCredits(sum(sizes), len(sizes))
    free, seen = list(range(len(sizes))), list[int]()
    left = list(sizes)
    while not slots.is_whole:
        while slots.wants_slot:
            slots.grant(free.pop())
        assert 0 < len(slots.granted) <= MAX_GRANTED
        filled = data.draw(st.sampled_from(sorted(slots.granted)))
        run = slots.landed(filled, left.pop(0))
        seen += range(run.start, run.stop)
    assert seen == list(range(sum(sizes)))
    assert not free
    assert slots.granted == set()


@pytest.mark.parametrize(("units", "parts"), [(4, 0), (4, 5), (0, 0)])
def test_a_chunk_in_no_parts_or_too_many_is_refused(units: int, parts: int) -> None:
    with pytest.raises(ProtocolError, match=f"{units} units in {parts} parts"):
        ChunkCredits(units, parts)


@pytest.mark.parametrize(
    ("slot", "units", "reason"),
    [
        (5, 1, "slot 5 was filled, which was not granted"),
        (0, 0, "a part of 0 units"),
        (0, 4, "a part of 4 units with 4 and 1 parts to come"),
        (0, 9, "a part of 9 units"),
    ],
)
def test_a_part_that_is_not_due_is_refused_and_changes_nothing(
    slot: int, units: int, reason: str
) -> None:
    slots = ChunkCredits(4, 2)
    slots.grant(0)
    slots.grant(1)
    with pytest.raises(ProtocolError, match=reason):
        slots.landed(slot, units)
    assert slots.granted == {0, 1}
    assert slots.landed(1, 3) == slice(0, 3)
    with pytest.raises(ProtocolError, match="which was not granted"):
        slots.landed(1, 1)
    assert slots.landed(0, 1) == slice(3, 4)
    assert slots.is_whole


def test_the_last_part_brings_all_that_is_left() -> None:
    slots = ChunkCredits(4, 1)
    slots.grant(0)
    with pytest.raises(ProtocolError, match="a part of 3 units with 4 and 0 parts"):
        slots.landed(0, 3)


def test_slots_of_a_link_that_broke_rest_behind_its_fence() -> None:
    sealed = False
    quarantine = Quarantine(rest_s=1.0)
    quarantine.add({1, 2}, lambda: sealed)
    quarantine.add({3}, lambda: True)
    quarantine.add(set(), lambda: True)
    assert len(quarantine) == 3
    assert quarantine.take_safe(10.0) == set()
    assert quarantine.take_safe(11.0) == {3}
    assert quarantine.take_safe(1e9) == set()
    sealed = True
    assert quarantine.take_safe(1e9) == set()
    sealed = False  # asked once: a sealed fence stays sealed
    assert quarantine.take_safe(1e9 + 0.5) == set()
    assert quarantine.take_safe(1e9 + 1.0) == {1, 2}
    assert len(quarantine) == 0
