"""Digests: equal for equal bytes however they are cut, and another for every flipped bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.digest import NO_DIGEST, SAMPLED_EVERY, DigestMode, Sampler, digest
from kv_transfer.settings import KvSettings, from_extra_config
from pdserve.errors import ConfigError


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=6))
def test_the_pieces_do_not_matter(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [memoryview(data)[a:b] for a, b in pairwise(edges)]
    assert digest(pieces) == digest([memoryview(data)])


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_a_flipped_bit_gives_another_digest(data: bytes, draw: Any) -> None:
    at = draw.draw(st.integers(0, 8 * len(data) - 1))
    other = bytearray(data)
    other[at // 8] ^= 1 << at % 8
    assert digest([memoryview(other)]) != digest([memoryview(data)])


def test_bytes_that_change_places_give_another_digest() -> None:
    a, b = memoryview(b"a" * 64), memoryview(b"b" * 64)
    assert digest([a, b]) != digest([b, a])


def test_no_bytes_have_a_digest_too() -> None:
    assert digest([]) != NO_DIGEST


@pytest.mark.parametrize(
    ("mode", "taken"),
    [
        (DigestMode.AUTO, 64),
        (DigestMode.ALWAYS, 64),
        (DigestMode.SAMPLED, 64 // SAMPLED_EVERY),
        (DigestMode.OFF, 0),
    ],
)
def test_a_mode_takes_its_share_and_every_suspect(mode: DigestMode, taken: int) -> None:
    sampler = Sampler(mode)
    assert sum(sampler.takes(suspect=False) for _ in range(64)) == taken
    if mode is DigestMode.AUTO:
        taken = 64 // SAMPLED_EVERY
    assert sum(sampler.takes(suspect=False, is_host=False) for _ in range(64)) == taken
    assert all(sampler.takes(suspect=True) for _ in range(64))


@pytest.mark.parametrize("mode", DigestMode)
def test_the_mode_is_read_from_text(mode: DigestMode) -> None:
    assert from_extra_config({"digest": str(mode)}).digest is mode


@pytest.mark.parametrize("value", ["", "all", "ALWAYS", True, 1, None, ["always"]])
def test_another_mode_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="auto, always, sampled, off") as caught:
        from_extra_config({"digest": value})
    assert caught.value.field == "kv.digest"


def test_what_costs_little_is_checked_unless_told_otherwise() -> None:
    assert KvSettings().digest is DigestMode.AUTO
