"""What a transport's two ends tell each other inside a link's Inner: read as written, and nothing
else read as anything."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import ProtocolError
from kv_transfer.messages import HEADER, Cancel, Inner, Message, decode, encode, pack
from kv_transfer.nccl import messages as nccl
from kv_transfer.transport import shm_target as shm

COUNT = st.integers(0, 2**63)
TEXT = st.text(max_size=20)
TABLES = {"nccl": nccl.KINDS, "shm": shm.KINDS}
MESSAGES: dict[str, st.SearchStrategy[Message]] = {
    "nccl": st.one_of(
        st.builds(nccl.Identify, COUNT, st.binary(max_size=130)),
        st.builds(nccl.Offer, COUNT, TEXT, COUNT),
        st.builds(nccl.Clear, COUNT, TEXT),
        st.builds(nccl.Refuse, COUNT, TEXT, TEXT),
        st.builds(nccl.Abort, COUNT, TEXT),
        st.builds(nccl.Finish, COUNT),
        st.builds(nccl.Moved),
    ),
    "shm": st.builds(shm.CacheAt, TEXT, COUNT, COUNT, st.lists(COUNT, max_size=7), TEXT, COUNT),
}
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXT)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
CRC_BYTES = 4


def signed(raw: object) -> bytes:
    """As a message that came whole."""
    body = msgspec.msgpack.encode(raw)
    return body + crc32(body).to_bytes(CRC_BYTES, "little")


transports = pytest.mark.parametrize("transport", TABLES)


@transports
@given(data=st.data())
def test_a_message_passes_through_the_link_as_it_was_written(transport: str, data: Any) -> None:
    message = data.draw(MESSAGES[transport])
    outer = decode(encode(Inner(pack(message)))[HEADER.size :])
    assert isinstance(outer, Inner)
    assert decode(outer.body, TABLES[transport]) == message


@transports
@given(data=st.data())
def test_damage_is_refused_or_is_a_message(transport: str, data: Any) -> None:
    body = bytearray(pack(data.draw(MESSAGES[transport])))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(body[: data.draw(st.integers(0, len(body)))]), TABLES[transport])
    except ProtocolError:
        return
    assert decode(pack(found), TABLES[transport]) == found


@transports
@given(data=st.data())
def test_a_field_of_any_other_value_is_refused_or_fits(transport: str, data: Any) -> None:
    raw = msgspec.msgpack.decode(pack(data.draw(MESSAGES[transport]))[:-CRC_BYTES])
    name = data.draw(st.sampled_from(sorted(raw)))
    raw[name] = data.draw(ANYTHING)
    try:
        found = decode(signed(raw), TABLES[transport])
    except ProtocolError:
        return
    if name != "t":
        assert getattr(found, name) == raw[name]


@transports
def test_a_message_of_the_link_is_none_of_a_transports(transport: str) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        decode(pack(Cancel("t")), TABLES[transport])


@pytest.mark.parametrize("kind", ["identify", "offer", "moved"])
def test_a_transports_message_is_none_of_the_link(kind: str) -> None:
    with pytest.raises(ProtocolError, match="makes no sense"):
        decode(signed({"t": kind}))
