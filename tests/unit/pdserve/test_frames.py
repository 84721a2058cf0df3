"""Frames in bytes: whatever way they are cut, they come as they went; what is none is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.frames import TOKEN_BYTES, MessageParser, Offer, offer_in, pack
from pdserve.rpc import MAX_MESSAGE_BYTES
from pdserve.v1 import worker_pb2 as w

OFFER = Offer(4711, bytes(TOKEN_BYTES))


def frame(texts: list[str]) -> w.StepFrame:
    numbers = range(len(texts))
    return w.StepFrame(tokens=w.PlainTokens(stream_ids=numbers, token_ids=numbers, texts=texts))


@given(
    frames=st.lists(st.builds(frame, st.lists(st.text(max_size=20), max_size=5)), max_size=5),
    cuts=st.lists(st.integers(0, 600), max_size=20),
)
def test_frames_come_whole_and_in_order(frames: list[w.StepFrame], cuts: list[int]) -> None:
    data = b"".join(map(pack, frames))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parser = MessageParser(w.StepFrame)
    found = []
    for start, end in itertools.pairwise(places):
        found += parser.feed(data[start:end])
    assert found == frames


@pytest.mark.parametrize(
    "data", [b"\0\0\0\x03\xff\xff\xff", (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")]
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    parser = MessageParser(w.StepFrame)
    whole = frame(["a"])
    found = parser.feed(pack(whole) + data)
    assert next(found) == whole
    with pytest.raises(InvalidRequest):
        next(found)


def test_an_offer_is_read_as_it_was_made_and_is_not_shown() -> None:
    for offer in (OFFER, replace(OFFER, takes_commands=False)):
        assert offer_in([("other", "x"), *offer.metadata]) == offer
    assert offer_in([("other", "x")]) is None
    assert offer_in(None) is None
    assert "token" not in repr(OFFER)


@pytest.mark.parametrize(
    "change",
    [
        ("pdserve-frames-port", "0"),
        ("pdserve-frames-port", "65536"),
        ("pdserve-frames-port", "x"),
        ("pdserve-frames-token-bin", b"short"),
    ],
)
def test_half_an_offer_is_refused(change: tuple[str, str | bytes]) -> None:
    with pytest.raises(InvalidRequest):
        offer_in(dict([*OFFER.metadata, change]).items())
    with pytest.raises(InvalidRequest):
        offer_in([x for x in OFFER.metadata if x[0] != change[0]])
