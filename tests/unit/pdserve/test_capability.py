"""A capability gives one right, to one worker, for a time; nothing else passes for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.capability import (
    KEY_BYTES,
    Capability,
    CapabilityExpired,
    CapabilityKey,
    CapabilityRefused,
    WorkerStart,
    mint,
    transfer_key,
    verify,
    verify_with,
)

KEY, OTHER_KEY = CapabilityKey(b"k" * KEY_BYTES), CapabilityKey(b"o" * KEY_BYTES)
SOURCE, TARGET = WorkerStart("p0", "e1"), WorkerStart("d0", "e2")
RIGHT = Capability("t1", SOURCE, TARGET, 1000)
TEXT = mint(KEY, RIGHT)

NAMES = st.text(st.characters(codec=None, categories=None), max_size=6)
STARTS = st.builds(WorkerStart, NAMES, NAMES)
RIGHTS = st.builds(Capability, NAMES, STARTS, STARTS, st.integers(0, 10**15 - 1))
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(CapabilityKey)


def check(key: CapabilityKey, text: str, right: Capability, now: float) -> None:
    verify(
        key,
        text,
        transfer_id=right.transfer_id,
        source=right.source,
        target=right.target,
        now=now,
    )


@given(KEYS, RIGHTS)
def test_the_right_is_had_until_it_expires(key: CapabilityKey, right: Capability) -> None:
    text = mint(key, right)
    check(key, text, right, right.expires_at - 1)
    with pytest.raises(CapabilityExpired):
        check(key, text, right, right.expires_at)


@given(KEYS, RIGHTS, RIGHTS)
def test_the_key_of_one_transfer_checks_its_rights_and_no_others(
    key: CapabilityKey, right: Capability, other: Capability
) -> None:
    signing = transfer_key(key, right.transfer_id, right.source)
    for presented in (right, other):
        parts = {
            "transfer_id": presented.transfer_id,
            "source": presented.source,
            "target": presented.target,
        }
        is_same = (presented.transfer_id, presented.source) == (right.transfer_id, right.source)
        text = mint(key, presented)
        if is_same:
            verify_with(signing, text, **parts, now=presented.expires_at - 1)  # type: ignore[arg-type]
            with pytest.raises(CapabilityExpired):
                verify_with(signing, text, **parts, now=presented.expires_at)  # type: ignore[arg-type]
        else:
            with pytest.raises(CapabilityRefused, match="not for this transfer"):
                verify_with(signing, text, **parts, now=0.0)  # type: ignore[arg-type]


@given(RIGHTS, RIGHTS)
def test_no_two_rights_encode_alike(one: Capability, other: Capability) -> None:
    assert (one.encoded() == other.encoded()) == (one == other)


@given(RIGHTS, RIGHTS)
def test_a_right_passes_for_no_other(one: Capability, other: Capability) -> None:
    claimed = replace(other, expires_at=one.expires_at)
    if claimed != one:
        with pytest.raises(CapabilityRefused, match="not for this transfer"):
            check(KEY, mint(KEY, one), claimed, 0.0)


@pytest.mark.parametrize(
    "claimed",
    [
        replace(RIGHT, transfer_id="t2"),
        replace(RIGHT, transfer_id=""),
        replace(RIGHT, transfer_id="t1p", source=WorkerStart("0", "e1")),
        replace(RIGHT, source=WorkerStart("p1", "e1")),
        replace(RIGHT, source=WorkerStart("p0", "e9")),
        replace(RIGHT, source=WorkerStart("p0e", "1")),
        replace(RIGHT, target=WorkerStart("d1", "e2")),
        replace(RIGHT, target=WorkerStart("d0", "e9")),
        replace(RIGHT, source=TARGET, target=SOURCE),
    ],
)
def test_another_transfer_or_worker_or_instance_id_is_refused(claimed: Capability) -> None:
    check(KEY, TEXT, RIGHT, 999.9)
    with pytest.raises(CapabilityRefused, match="not for this transfer"):
        check(KEY, TEXT, claimed, 999.9)


def test_a_forgery_is_not_told_that_it_has_expired() -> None:
    head, _, mac = TEXT.rpartition(".")
    forged = f"{head}.{'0' * len(mac)}"
    with pytest.raises(CapabilityRefused) as caught:
        check(KEY, forged, RIGHT, 5000.0)
    assert type(caught.value) is CapabilityRefused


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no capability"),
        ("1", "malformed"),
        (TEXT[:-1], "malformed"),
        (TEXT + "0", "malformed"),
        (TEXT + "\n", "malformed"),
        (" " + TEXT, "malformed"),
        (TEXT.upper(), "malformed"),
        (TEXT.replace("2.", "1.", 1), "malformed"),
        (TEXT.replace(".1000.", ".-1000."), "malformed"),
        (TEXT.replace(".1000.", ".01000."), "malformed"),
        (TEXT.replace(".1000.", ".1e9."), "malformed"),
        (TEXT.replace(".1000.", ".١٠٠٠."), "malformed"),
        (TEXT.replace(".1000.", "." + "9" * 5000 + "."), "malformed"),
        (TEXT.replace(".1000.", ".2000."), "not for this transfer"),
        (mint(OTHER_KEY, RIGHT), "another key"),
        (mint(OTHER_KEY, RIGHT).replace(OTHER_KEY.key_id, KEY.key_id), "not for this transfer"),
    ],
)
def test_what_no_router_made_is_refused(text: str, reason: str) -> None:
    with pytest.raises(CapabilityRefused, match=reason):
        check(KEY, text, RIGHT, 0.0)


@given(st.text(max_size=100) | st.integers(0, len(TEXT) - 1).map(lambda at: TEXT[:at] + "x"))
def test_any_other_text_is_refused_and_nothing_else_happens(text: str) -> None:
    with pytest.raises(CapabilityRefused):
        check(KEY, text, RIGHT, 0.0)


@given(st.integers(0, len(TEXT) - 1), st.sampled_from("0123456789abcdef."))
def test_one_changed_character_is_refused(at: int, character: str) -> None:
    changed = TEXT[:at] + character + TEXT[at + 1 :]
    if changed != TEXT:
        with pytest.raises(CapabilityRefused):
            check(KEY, changed, RIGHT, 0.0)


def test_keys_differ_and_travel_unchanged() -> None:
    one, other = CapabilityKey.generate(), CapabilityKey.generate()
    assert one != other
    assert one == CapabilityKey(one.reveal()) == CapabilityKey.from_hex(one.reveal().hex())
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, CapabilityKey(one.reveal())}) == 1
    assert one != one.reveal()


@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_a_key_is_never_shown(secret: bytes) -> None:
    key = CapabilityKey(secret)
    for shown in (repr(key), str(key), f"{key}", repr([key]), "%s" % key, mint(key, RIGHT)):  # noqa: UP031
        assert secret.hex() not in shown
        assert repr(secret) not in shown


@pytest.mark.parametrize("secret", [b"", b"short", b"k" * (KEY_BYTES + 1)])
def test_a_key_of_another_length_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match=f"not {len(secret)}"):
        CapabilityKey(secret)


@pytest.mark.parametrize("text", ["", "kk" * KEY_BYTES, "00", "0" * (2 * KEY_BYTES - 1)])
def test_text_that_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="a capability key") as caught:
        CapabilityKey.from_hex(text)
    error: Any = caught.value
    assert error.__suppress_context__ or error.__context__ is None
    assert not text or text not in str(error)
