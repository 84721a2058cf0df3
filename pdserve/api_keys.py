"""API keys and their hashes. Configuration has hashes alone; a key is shown when it is made.

A plain SHA-256 does, because keys are random: nobody can try 2^256 of them. It would not do for
words that people choose.
"""

from __future__ import annotations

import hashlib
import re
import secrets

KEY_BYTES = 32
_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """A key that nobody else has."""
    return f"pd-{secrets.token_urlsafe(KEY_BYTES)}"


def digest_of(key: str) -> bytes:
    """The 32 bytes that a key is known by."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def hash_key(key: str) -> str:
    """What configuration says of a key."""
    return _PREFIX + digest_of(key).hex()


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def digest_in(text: str) -> bytes:
    """The digest that a hash of the configuration stands for."""
    return bytes.fromhex(text.removeprefix(_PREFIX))
