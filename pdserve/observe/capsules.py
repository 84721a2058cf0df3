"""Incident capsules: all that a router knows of one request, in a file for `pdserve replay`.

A file is a line with the format's name, a line of JSON (`CapsuleHeader`), and the compressed JSON
of a `Capsule`. With a key that JSON is encrypted with AES-256-GCM, which also protects both lines
against changes. The header stays readable, so that capsules can be listed without the key.
"""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Struct, structs

from pdserve.config import refuse
from pdserve.errors import InvalidRequest, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

FAILURE, DEMAND = "failure", "demand"
"""Reasons why a capsule was made; others name what found a wrong answer, such as `audit`."""
_MAGIC = b"pdserve-capsule 1"
_NONCE_BYTES = 12
_MAX_BYTES = 1 << 28  # of the JSON: a changed file must not fill the memory


class CapsuleHeader(Struct, frozen=True, kw_only=True):
    """What may be known of a capsule without its key. `code`: of the error that ended the request,
    "" if it was answered. `key`: the first digits of a digest of the key, "" without encryption."""

    request_id: str
    model: str
    tenant: str = ""
    reason: str = DEMAND
    code: str = ""
    created: float = 0.0  # Unix time
    region: str = ""
    key: str = ""


class CapsuleStream(Struct, kw_only=True):
    """A stream of an answer on a worker. `pair`: ids of the workers that exchanged KV for it.
    `cause`: why the previous attempt ended. `from_token`: length of the answer when it began.
    `report`: its times, cached tokens and transfer, as the worker reported them; None if it did
    not."""

    worker: str
    instance: str
    role: str
    side: str
    pair: tuple[str, ...] = ()
    cause: str = ""
    from_token: int = 0
    weights: str = ""
    died: bool = False
    report: dict[str, Any] | None = None


class CapsuleSpan(Struct, frozen=True):
    """The tokens from `start` to before `end` were sampled by `worker`, with KV of the prompt from
    `source`, "" if it computed that itself."""

    worker: str
    start: int
    end: int
    source: str = ""


class CapsuleAnswer(Struct, kw_only=True):
    """One answer of a request. `tokens`: what was sent. `expected`: the right tokens, if something
    else computed them, or with `expected_is_part` the first ones; None if nobody knows."""

    index: int = 0
    tokens: list[int]
    finish_reason: str = ""
    retries: list[str] = []
    spans: list[CapsuleSpan] = []
    streams: list[CapsuleStream] = []
    copies: list[CapsuleStream] = []
    expected: list[int] | None = None
    expected_is_part: bool = False


class Capsule(Struct, kw_only=True):
    """One request. `prompt`: its tokens, None if they are withheld; then `sampling` has no texts.
    `unlike`: what a replay cannot repeat. `versions`: of the router. `settings`: sections of its
    configuration. `workers`: registrations by id. `blocks`: chain hashes of the prompt's blocks by
    block size, as the router's index of cached prefixes names them. `placement`: as of
    `pdserve explain --json`. `timing`: in seconds since the arrival."""

    header: CapsuleHeader
    prompt_tokens: int
    sampling: dict[str, Any]
    prompt: list[int] | None = None
    answers: list[CapsuleAnswer] = []
    message: str = ""
    adapter: str = ""
    service_class: str = ""
    trace_id: str = ""
    unlike: list[str] = []
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}
    workers: dict[str, dict[str, Any]] = {}
    blocks: dict[str, list[str]] = {}
    placement: dict[str, Any] = {}
    timing: dict[str, float] = {}
    usage: dict[str, Any] | None = None
    receipt: dict[str, Any] | None = None


def seal(capsule: Capsule, secrets: Iterable[str] = ()) -> bytes:
    """Return the file of a capsule, encrypted with the first secret if there are some."""
    secret = next(iter(secrets), "")
    header = structs.replace(capsule.header, key=key_name(secret) if secret else "")
    capsule.header = header
    start = b"%b\n%b\n" % (_MAGIC, msgspec.json.encode(header))
    body = zlib.compress(msgspec.json.encode(capsule))
    if not secret:
        return start + body
    nonce = os.urandom(_NONCE_BYTES)
    return start + nonce + AESGCM(_derived(secret, b"encryption")).encrypt(nonce, body, start)


def header_of(data: bytes) -> CapsuleHeader:
    """Return the header of a file, of which `data` is at least the beginning. Raises
    InvalidRequest."""
    magic, _, rest = data.partition(b"\n")
    line, end, _ = rest.partition(b"\n")
    try:
        if magic != _MAGIC or not end:
            _refuse("this file is not an incident capsule that this version reads")
        return msgspec.json.decode(line, type=CapsuleHeader)
    except msgspec.DecodeError as error:
        _refuse(f"its header cannot be read: {error}")


def unseal(data: bytes, secrets: Iterable[str] = (), at: str = "key_file") -> Capsule:
    """Return the capsule of a file. `at` names the option or key of the `secrets`. Raises
    ConfigError naming it without the right key, and InvalidRequest for a damaged file."""
    header = header_of(data)
    start = data[: data.index(b"\n", len(_MAGIC) + 1) + 1]
    body = data[len(start) :]
    if header.key:
        named = {key_name(secret): secret for secret in secrets}
        if header.key not in named:
            held = ", ".join(sorted(named)) or "none"
            refuse(at, f"must have key {printable(header.key)} of this capsule; it has {held}")
        try:
            cipher = AESGCM(_derived(named[header.key], b"encryption"))
            body = cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], start)
        except (InvalidTag, ValueError):
            _refuse("it was changed after it was encrypted")
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(body, _MAX_BYTES)
        if not reader.eof:
            _refuse(f"it is incomplete, or has more than {_MAX_BYTES >> 20} MiB")
        return msgspec.json.decode(text, type=Capsule)
    except (zlib.error, msgspec.DecodeError) as error:
        _refuse(f"its content cannot be read: {error}")


def key_name(secret: str) -> str:
    """Return the name by which a header says which secret encrypts the capsule."""
    return _derived(secret, b"name").hex()[:8]


def _derived(secret: str, purpose: bytes) -> bytes:
    info = b"pdserve capsule " + purpose
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret.encode())


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequest(f"capsule: {reason}", field="capsule")
