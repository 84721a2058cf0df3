"""Token ids of the parts of long texts, so that the next turn of a conversation tokenises only new
text.

`Tokenizer.encode` divides a text before added tokens such as `<|im_start|>`, where the tokens of
the parts equal the tokens of the whole. The key of a part is a digest of its text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING

from pdserve.model.token_ids import TokenIds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# 160 bits of a cryptographic hash, so that no client can construct two texts with one digest.
_DIGEST_BYTES = 20
# Bytes of a part besides its token ids: the digest, and Python's overhead per object.
_ENTRY_BYTES = 330


@dataclass(slots=True)
class _Kept:
    """Token ids of one tenant's parts, the least recently used first."""

    parts: OrderedDict[bytes, TokenIds] = field(default_factory=OrderedDict)
    size: int = 0


class TokenCache:
    """Token ids of texts, at most `most_bytes` of them. May be used by several threads.

    A tenant cannot learn from the time of a request whether another one sent the same text, because
    each tenant, and each of its cache salts, has its own parts. Above the limit, parts of the
    tenant with the most are dropped, so that one tenant cannot displace the parts of others.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._tenants: dict[str, _Kept] = {}
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    def of(self, tenant: str, salt: str = "") -> CachedParts:
        """Return the parts of a tenant's requests with this cache salt."""
        return CachedParts(self, tenant, salt)

    def find(self, tenant: str, digests: Sequence[bytes]) -> list[TokenIds | None]:
        with self._lock:
            kept = self._tenants.get(tenant)
            if kept is None:
                return [None] * len(digests)
            found = [kept.parts.get(digest) for digest in digests]
            for digest, tokens in zip(digests, found, strict=True):
                if tokens is not None:
                    kept.parts.move_to_end(digest)
            return found

    def add(self, tenant: str, parts: dict[bytes, TokenIds]) -> None:
        with self._lock:
            kept = self._tenants.setdefault(tenant, _Kept())
            for digest, tokens in parts.items():
                if digest not in kept.parts:
                    kept.parts[digest] = tokens
                    kept.size += _bytes_of(tokens)
                    self._size += _bytes_of(tokens)
            while self._size > self._most:
                self._drop_one()

    def _drop_one(self) -> None:
        name, kept = max(self._tenants.items(), key=lambda x: x[1].size)
        _, tokens = kept.parts.popitem(last=False)
        kept.size -= _bytes_of(tokens)
        self._size -= _bytes_of(tokens)
        if not kept.parts:
            del self._tenants[name]


def _bytes_of(tokens: TokenIds) -> int:
    return len(tokens.packed) + len(tokens.varints) + _ENTRY_BYTES


class CachedParts:
    """The cached parts of one tenant and cache salt."""

    def __init__(self, cache: TokenCache, tenant: str, salt: str) -> None:
        self._cache, self._tenant = cache, tenant
        self._salt = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()

    def encode(
        self,
        tokenizer: bytes,
        parts: Sequence[str],
        encode: Callable[[list[str]], Sequence[Sequence[int]]],
    ) -> TokenIds:
        """Return the token ids of all parts. `tokenizer`: at most 64 bytes that identify it.
        `encode` returns the token ids of uncached parts."""
        salted = blake2b(self._salt, digest_size=_DIGEST_BYTES, key=tokenizer)
        digests = []
        for part in parts:
            digest = salted.copy()
            digest.update(part.encode())
            digests.append(digest.digest())
        found = self._cache.find(self._tenant, digests)
        known = dict(zip(digests, found, strict=True))
        new = {x: part for x, part in zip(digests, parts, strict=True) if known[x] is None}
        if new:
            made = encode(list(new.values()))
            added = {x: TokenIds.of(y) for x, y in zip(new, made, strict=True)}
            self._cache.add(self._tenant, added)
            known |= added
        return TokenIds.joined(x for digest in digests if (x := known[digest]) is not None)
