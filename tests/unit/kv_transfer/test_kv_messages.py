"""Messages: what is written is read again, and nothing else is read as anything."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import ProtocolError
from kv_transfer.messages import (
    HEADER,
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    Ack,
    Again,
    Alive,
    Cancel,
    Chunk,
    Done,
    Fail,
    Grant,
    Hello,
    Inner,
    Message,
    Refusal,
    Taken,
    Welcome,
    body_length,
    decode,
    encode,
)

TEXT = st.text(max_size=20)
COUNT = st.integers(0, 2**63)
COUNTS = st.lists(COUNT, max_size=20)
SECONDS = st.floats(0, 1e9)
OFFERS = st.lists(
    st.dictionaries(TEXT, st.one_of(TEXT, COUNT, COUNTS, st.none(), st.booleans()), max_size=4),
    max_size=3,
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, COUNT, TEXT, TEXT, TEXT, OFFERS, TEXT),
    st.builds(Welcome, TEXT, TEXT),
    st.builds(Refusal, TEXT),
    st.builds(Grant, TEXT, COUNT, COUNT, COUNTS, TEXT, COUNTS, COUNT, COUNT),
    st.builds(Taken, TEXT, COUNT, TEXT),
    st.builds(Cancel, TEXT, TEXT),
    st.builds(Ack, TEXT),
    st.builds(Again, TEXT, COUNT),
    st.builds(Chunk, TEXT, COUNT, COUNT, COUNT, st.integers(0, 2**64 - 1)),
    st.builds(Done, TEXT, COUNTS, SECONDS, SECONDS),
    st.builds(Fail, TEXT, TEXT),
    st.builds(Inner, st.binary(max_size=60)),
    st.builds(Alive, st.lists(TEXT, max_size=5)),
)
JSON_LIKE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXT)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


CRC_BYTES = 4


def as_map(message: Message) -> dict[str, Any]:
    """The body, without what guards it."""
    found: dict[str, Any] = msgspec.msgpack.decode(encode(message)[HEADER.size : -CRC_BYTES])
    return found


def guarded(body: bytes) -> bytes:
    """As it comes when it came whole."""
    return body + crc32(body).to_bytes(CRC_BYTES, "little")


def body_of(raw: object) -> bytes:
    """A body that holds anything at all."""
    return guarded(msgspec.msgpack.encode(raw))


def read(data: bytes) -> Message:
    """What a link does with the bytes it gets."""
    length = body_length(data[: HEADER.size])
    body = data[HEADER.size :]
    assert len(body) == length
    return decode(body)


def read_or_refuse(body: bytes) -> Message | None:
    """None where the body is refused; any other error is the test's failure."""
    try:
        return decode(body)
    except ProtocolError:
        return None


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert read(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_a_message(body: bytes) -> None:
    message = read_or_refuse(body)
    assert message is None or read(encode(message)) == message


@given(MESSAGES, st.data())
def test_a_damaged_message_is_refused_or_is_a_message(message: Message, data: Any) -> None:
    body = bytearray(encode(message)[HEADER.size :])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    read_or_refuse(bytes(body))
    read_or_refuse(bytes(body[:cut]))


@given(MESSAGES, st.data())
def test_a_flipped_bit_is_always_found(message: Message, data: Any) -> None:
    body = bytearray(encode(message)[HEADER.size :])
    at = data.draw(st.integers(0, 8 * len(body) - 1))
    body[at // 8] ^= 1 << at % 8
    with pytest.raises(ProtocolError):
        decode(bytes(body))


@given(MESSAGES, st.data())
def test_a_field_of_any_other_value_is_refused_or_fits(message: Message, data: Any) -> None:
    raw = as_map(message)
    name = data.draw(st.sampled_from(sorted(raw)))
    raw[name] = data.draw(JSON_LIKE)
    found = read_or_refuse(body_of(raw))
    if found is not None and name != "t":
        assert getattr(found, name) == raw[name]


@pytest.mark.parametrize(
    "message", [Cancel("t"), Again("t", 0), Chunk("t", 0, 1, 64), Done("t", [1], 0.1, 0.2)]
)
def test_a_missing_or_added_field_is_refused(message: Message) -> None:
    raw = as_map(message)
    for field in msgspec.structs.fields(message):
        less = {k: v for k, v in raw.items() if k != field.name}
        if field.required:
            with pytest.raises(ProtocolError, match=f"missing required field `{field.name}`"):
                decode(body_of(less))
        else:
            assert getattr(decode(body_of(less)), field.name) == field.default
    with pytest.raises(ProtocolError, match="unknown field `more`"):
        decode(body_of({**raw, "more": 1}))


CHUNK = {"t": "chunk", "transfer_id": "x", "first": 0, "count": 1, "bytes": 8, "digest": 1}
AGAIN = {"t": "again", "transfer_id": "x", "first": 0}
GRANT = {
    "t": "grant",
    "transfer_id": "x",
    "first_block": 0,
    "num_tokens": 4,
    "block_ids": [1],
    "capability": "",
    "heads": [0, 1, 0],
    "readers": 1,
}
DONE = {"t": "done", "transfer_id": "x", "token_ids": [1], "push_s": 0.0, "exposed_s": 0.0}
HELLO = {
    "t": "hello",
    "version": 1,
    "instance_id": "",
    "producer_instance_id": "",
    "compatibility": "",
    "worker_id": "",
}


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (CHUNK, "first", -1),
        (CHUNK, "count", True),
        (CHUNK, "count", 1.0),
        (CHUNK, "bytes", "8"),
        (CHUNK, "digest", -1),
        (CHUNK, "digest", "1"),
        (CHUNK, "digest", None),
        (CHUNK, "transfer_id", b"x"),
        (AGAIN, "first", -1),
        (AGAIN, "first", [0]),
        (AGAIN, "transfer_id", 1),
        (CHUNK, "transfer_id", None),
        (GRANT, "block_ids", [-1]),
        (GRANT, "block_ids", [True]),
        (GRANT, "block_ids", [1.5]),
        (GRANT, "block_ids", {"0": 1}),
        (GRANT, "num_tokens", -4),
        (GRANT, "heads", [0, -1, 0]),
        (GRANT, "heads", [0, 1, "0"]),
        (GRANT, "heads", None),
        (GRANT, "readers", -1),
        (GRANT, "readers", True),
        (DONE, "token_ids", [-1]),
        (DONE, "token_ids", ["1"]),
        (DONE, "push_s", float("nan")),
        (DONE, "push_s", float("inf")),
        (DONE, "exposed_s", -0.1),
        (DONE, "exposed_s", False),
        (GRANT, "capability", None),
        (GRANT, "capability", b"1"),
        ({**HELLO, "offers": []}, "worker_id", 1),
        (HELLO, "offers", [1]),
        (HELLO, "offers", {}),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_field(
    base: dict[str, Any], field: str, value: Any
) -> None:
    with pytest.raises(ProtocolError, match=rf"\$\.{field}"):
        decode(body_of({**base, field: value}))


@pytest.mark.parametrize(
    "body",
    [
        body_of(1),
        body_of([]),
        body_of({}),
        body_of({"t": "nothing"}),
        body_of({"t": ["hello"]}),
        body_of({1: 2}),
        msgspec.msgpack.encode({"t": "ack", "transfer_id": "x"}),
        msgspec.msgpack.encode({"t": "refusal", "reason": "x"}),
        body_of({"t": "ack", "transfer_id": "x"}) + b"\0",
        guarded(msgspec.msgpack.encode({"t": "refusal", "reason": "x"}) + b"\0"),
        guarded(b"\xdd\xff\xff\xff\xff"),
        guarded(b"\x91" * 2000),
        guarded(b"\x82\xa1t\xa5hello\xa6offers" + b"\x91" * 2000),
        guarded(b"\x82\xa1t\xa5alive\xactransfer_ids\xdd\xff\xff\xff\xff"),
        guarded(b"\xa4\xff\xff\xff\xff"),
        guarded(b""),
        b"",
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize(
    ("length", "limit", "fits"),
    [
        (0, MAX_MESSAGE_BYTES, False),
        (1, MAX_MESSAGE_BYTES, True),
        (MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES, True),
        (MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES, False),
        (2**32 - 1, MAX_MESSAGE_BYTES, False),
        (MAX_HANDSHAKE_BYTES + 1, MAX_HANDSHAKE_BYTES, False),
    ],
)
def test_a_length_over_the_limit_is_refused(length: int, limit: int, fits: bool) -> None:
    header = HEADER.pack(length)
    if fits:
        assert body_length(header, limit) == length
        return
    with pytest.raises(ProtocolError, match=str(length)):
        body_length(header, limit)


def test_a_message_over_the_limit_is_not_written() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Fail("t", "x" * MAX_MESSAGE_BYTES))


def test_the_largest_grant_of_a_million_token_context_fits() -> None:
    grant = Grant("t" * 256, 0, 1 << 20, list(range(1 << 20, (1 << 20) + (1 << 16))))
    assert read(encode(grant)) == grant


def test_no_message_shows_its_capability() -> None:
    for message in (Cancel("t", "secret"), Grant("t", 0, 1, [0], "secret")):
        assert "secret" not in repr(message)
        assert "transfer_id='t'" in repr(message)
