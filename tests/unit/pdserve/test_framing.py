"""Frames in bytes: whatever way they are cut, they come as they went; what is none is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.net.framing import MAX_FRAME_BYTES, FrameParser, pack
from pdserve.v1 import worker_pb2 as w


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
    parser = FrameParser(w.StepFrame)
    found = []
    for start, end in itertools.pairwise(places):
        found += parser.feed(data[start:end])
    assert found == frames


@pytest.mark.parametrize(
    "data", [b"\0\0\0\x03\xff\xff\xff", (MAX_FRAME_BYTES + 1).to_bytes(4, "big")]
)
def test_an_invalid_frame_is_refused(data: bytes) -> None:
    parser = FrameParser(w.StepFrame)
    whole = frame(["a"])
    found = parser.feed(pack(whole) + data)
    assert next(found) == whole
    with pytest.raises(InvalidRequest):
        next(found)
