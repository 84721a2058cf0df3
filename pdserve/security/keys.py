"""API keys and their hashes. The configuration has only hashes; a key is shown once, when it is
created.

SHA-256 without salt suffices because keys are random. It would not for passwords.
"""

from __future__ import annotations

import hashlib
import re
import secrets

KEY_BYTES = 32
_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    return f"pd-{secrets.token_urlsafe(KEY_BYTES)}"


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def hash_key(key: str) -> str:
    """Return the hash of a key in the format of the configuration."""
    return _PREFIX + digest_of(key).hex()


def name_of(key: str) -> str:
    """Return the beginning of a key's hash, which distinguishes keys and reveals none."""
    return hash_key(key)[: len(_PREFIX) + 12]


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def digest_in(text: str) -> bytes:
    """Return the digest in a hash from the configuration."""
    return bytes.fromhex(text.removeprefix(_PREFIX))
