"""The format of incident capsules."""

from __future__ import annotations

import pytest
from msgspec import structs

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.observe.capsules import (
    Capsule,
    CapsuleAnswer,
    CapsuleHeader,
    CapsuleSpan,
    header_of,
    key_name,
    seal,
    unseal,
)

KEY, OTHER = "k" * 32, "o" * 32
HEADER = CapsuleHeader(request_id="r\n1", model="m", tenant="t", code="worker_failed", created=5.0)


def capsule() -> Capsule:
    answer = CapsuleAnswer(
        tokens=[7, 8], spans=[CapsuleSpan("d", 1, 2, "p")], finish_reason="length", expected=[7, 9]
    )
    return Capsule(
        header=HEADER,
        prompt_tokens=3,
        prompt=[1, 2, 1 << 20],
        sampling={"seed": 3, "temperature": 0.0},
        answers=[answer],
    )


def test_a_capsule_is_read_as_it_was_written() -> None:
    data = seal(capsule())
    assert header_of(data) == HEADER
    assert unseal(data) == capsule()


def test_an_encrypted_capsule_shows_its_header_alone_and_any_known_key_opens_it() -> None:
    data = seal(capsule(), [KEY, OTHER])
    assert header_of(data) == structs.replace(HEADER, key=key_name(KEY))
    assert b"temperature" not in data
    assert unseal(data, [OTHER, KEY]).answers == capsule().answers
    assert seal(capsule(), [KEY]) != data, "a nonce is never used twice"


def test_a_wrong_key_is_refused_by_name() -> None:
    data = seal(capsule(), [KEY])
    for secrets, held in (([OTHER], key_name(OTHER)), ([], "none")):
        with pytest.raises(ConfigError) as refused:
            unseal(data, secrets, "--key-file")
        assert refused.value.field == "--key-file"
        assert f"must have key {key_name(KEY)}" in refused.value.message
        assert f"it has {held}" in refused.value.message


@pytest.mark.parametrize("secrets", [[], [KEY]])
def test_a_damaged_file_is_refused(secrets: list[str]) -> None:
    data = seal(capsule(), secrets)
    for wrong in (b"", b"GIF89a", data[:-1], data[:40], data + b"x" if secrets else data[:-9]):
        with pytest.raises(InvalidRequest) as refused:
            unseal(wrong, secrets)
        assert refused.value.field == "capsule"


def test_a_changed_header_is_noticed_with_a_key() -> None:
    data = seal(capsule(), [KEY]).replace(b'"tenant":"t"', b'"tenant":"u"')
    with pytest.raises(InvalidRequest, match="it was changed"):
        unseal(data, [KEY])
