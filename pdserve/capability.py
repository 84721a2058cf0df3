"""The right to one KV transfer: made by a router, presented by the target, checked by the source.

A capability is an HMAC-SHA256 under a key that the source worker shares with its routers. It covers
the transfer's id, both workers with their instance ids, and the time at which it expires. Its text
names only what the source does not know: which key, and until when. Whoever holds the text holds
the right, so it is logged no more than the key is.

The key that signs is made of the worker's for the one transfer. So a source can have others check
who may take one transfer, and they learn nothing of the rest.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY_BYTES: Final = 32
# What is signed begins with this, so that the key's MACs serve for nothing else.
_PURPOSE: Final = "pdserve kv capability 2"
_TRANSFER_PURPOSE: Final = "pdserve kv transfer key"
_ID_PURPOSE: Final = b"pdserve kv key id"
_TEXT: Final = re.compile(r"2\.([0-9a-f]{8})\.(0|[1-9][0-9]{0,14})\.([0-9a-f]{64})", re.ASCII)


class CapabilityRefused(ValueError):
    """The capability does not give the right that it was presented for; the message says why."""


class CapabilityExpired(CapabilityRefused):
    """A router made it for this very transfer, and its time is over."""


class CapabilityKey:
    """A worker's secret. Shown and logged, it is its id alone, which tells nothing of it."""

    __slots__ = ("_secret", "key_id")

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError where `secret` is not KEY_BYTES long."""
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a capability key has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self.key_id = hmac.digest(secret, _ID_PURPOSE, "sha256")[:4].hex()

    @classmethod
    def generate(cls) -> CapabilityKey:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> CapabilityKey:
        """Raises ValueError, without the text, where it is not a key in hexadecimal."""
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            raise ValueError("a capability key is written in hexadecimal") from None
        return cls(secret)

    def reveal(self) -> bytes:
        """The secret itself, for whoever shares it."""
        return self._secret

    def sign(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256")

    def __repr__(self) -> str:
        return f"CapabilityKey({self.key_id})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CapabilityKey):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.key_id)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One start of one worker: an instance id is never used twice."""

    worker_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Capability:
    """`target` may take the KV of `transfer_id` from `source`, up to `expires_at` in whole seconds
    since 1970, by the wall clock: the two ends may be on different machines."""

    transfer_id: str
    source: WorkerStart
    target: WorkerStart
    expires_at: int

    def encoded(self) -> bytes:
        """What is signed. Each part has its length in front, so no two capabilities encode alike,
        whatever is in their names."""
        parts = (
            _PURPOSE,
            self.transfer_id,
            self.source.worker_id,
            self.source.instance_id,
            self.target.worker_id,
            self.target.instance_id,
            str(self.expires_at),
        )
        return _joined(parts)


def _joined(parts: Iterable[str]) -> bytes:
    # Text from a peer may hold lone surrogates; they too encode to something of their own.
    raw = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in raw)


def transfer_key(key: CapabilityKey, transfer_id: str, source: WorkerStart) -> bytes:
    """What the capabilities of one transfer are signed with; `key` is the source worker's."""
    parts = (_TRANSFER_PURPOSE, transfer_id, source.worker_id, source.instance_id)
    return key.sign(_joined(parts))


def mint(key: CapabilityKey, capability: Capability) -> str:
    """The text to present. `key` is the source worker's."""
    signing = transfer_key(key, capability.transfer_id, capability.source)
    mac = hmac.digest(signing, capability.encoded(), "sha256").hex()
    return f"2.{key.key_id}.{capability.expires_at}.{mac}"


def verify(
    key: CapabilityKey,
    text: str,
    *,
    transfer_id: str,
    source: WorkerStart,
    target: WorkerStart,
    now: float,
) -> None:
    """Returns where `text` gives `target` the right to this transfer of `source` at `now`, in
    seconds since 1970.

    Raises CapabilityExpired for what gave that very right until its time was over, and
    CapabilityRefused for all else: a forgery and the right to something else look the same.
    """
    key_id, expires_at, mac = _read(text)
    if key_id != key.key_id:
        raise CapabilityRefused("the capability is of another key")
    due = Capability(transfer_id, source, target, expires_at)
    _check(transfer_key(key, transfer_id, source), due, mac, now)


def verify_with(
    signing: bytes,
    text: str,
    *,
    transfer_id: str,
    source: WorkerStart,
    target: WorkerStart,
    now: float,
) -> None:
    """`verify`, for who has the `transfer_key` alone."""
    _, expires_at, mac = _read(text)
    _check(signing, Capability(transfer_id, source, target, expires_at), mac, now)


def _check(signing: bytes, due: Capability, mac: bytes, now: float) -> None:
    if not hmac.compare_digest(hmac.digest(signing, due.encoded(), "sha256"), mac):
        raise CapabilityRefused("the capability is not for this transfer between these workers")
    if now >= due.expires_at:
        raise CapabilityExpired("the capability has expired")


def _read(text: str) -> tuple[str, int, bytes]:
    """(key id, expiry, MAC). Raises CapabilityRefused."""
    if not text:
        raise CapabilityRefused("no capability was presented")
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CapabilityRefused("the capability is malformed")
    key_id, expires_at, mac = match.groups()
    return key_id, int(expires_at), bytes.fromhex(mac)
