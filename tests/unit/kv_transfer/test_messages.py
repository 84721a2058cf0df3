"""What is written is read again, and nothing else is."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import ProtocolError
from kv_transfer.protocol import messages as m

COUNT = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=20)
BY_TYPE = {
    "int": COUNT,
    "bool": st.booleans(),
    "float": st.floats(0, 1e9),
    "str": TEXT,
    "bytes": st.binary(max_size=40),
    "list[int]": st.lists(COUNT, max_size=5),
    "list[str]": st.lists(TEXT, max_size=3),
    str(list[m.GroupBlocks]): st.lists(
        st.builds(m.GroupBlocks, COUNT, COUNT, *[st.lists(COUNT, max_size=5)] * 3), max_size=3
    ),
    "list[dict[str, typing.Any]]": st.lists(st.dictionaries(TEXT, COUNT, max_size=2), max_size=2),
    "dict[str, typing.Any]": st.dictionaries(TEXT, COUNT, max_size=2),
}
KINDS = [kind for kind in m.KvMessage.__subclasses__() if kind.__module__ == m.__name__]


def made(kind: type[m.KvMessage]) -> st.SearchStrategy[m.KvMessage]:
    def by_type(found: Any) -> st.SearchStrategy[Any]:
        name = found.__name__ if isinstance(found, type) and not hasattr(found, "__args__") else ""
        return BY_TYPE[name or str(found)]

    hints = get_type_hints(kind)
    return st.builds(kind, **{name: by_type(hints[name]) for name in kind.__struct_fields__})


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type[m.KvMessage], data: Any) -> None:
    message = data.draw(made(kind))
    written = m.encode(message)
    length = m.body_length(written[: m.HEADER.size])
    assert length == len(written) - m.HEADER.size
    assert m.decode(written[m.HEADER.size :]) == message


@given(body=st.binary(max_size=200))
def test_garbage_is_an_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(body)


@given(bit=st.integers(0, 8 * 40 - 1))
def test_a_flipped_bit_is_found(bit: int) -> None:
    body = bytearray(
        m.pack(
            m.Subscribe("transfer", 14, [m.GroupBlocks(0, 0, [9, 3, 4, 17], [0, 1, 0], [0, 3, 0])])
        )
    )
    at = bit // 8 % len(body)
    body[at] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        m.decode(body)


def packed(value: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(value)
    return body + m._CRC.pack(m.crc32(body))


@pytest.mark.parametrize(
    "value",
    [
        {"t": "ack"},
        {"t": "ack", "transfer_id": 3},
        {"t": "ack", "transfer_id": "t", "more": 1},
        {"t": "nothing", "transfer_id": "t"},
        {"t": "nack", "transfer_id": "t", "first": -1},
        {"t": "done", "transfer_id": "t", "token_ids": [1], "transfer_s": float("inf"), "x": 0},
        {"t": "chunkready", "transfer_id": "t", "first": 0, "count": 1.5, "size": 1},
    ],
)
def test_a_message_with_wrong_fields_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="invalid message"):
        m.decode(packed(value))


def test_lengths_are_limited_in_both_directions() -> None:
    for length in (0, m.MAX_MESSAGE_BYTES + 1):
        with pytest.raises(ProtocolError, match="message length"):
            m.body_length(m.HEADER.pack(length))
    with pytest.raises(ProtocolError, match="message length"):
        m.body_length(m.HEADER.pack(m.MAX_HANDSHAKE_BYTES + 1), m.MAX_HANDSHAKE_BYTES)
    with pytest.raises(ProtocolError, match="exceeds"):
        m.encode(m.Fail("t", "x" * m.MAX_MESSAGE_BYTES))
