"""API keys of tenants. No key is kept, logged or repeated."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from pdserve.errors import Unauthenticated
from pdserve.security.keys import digest_in, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TenantConfig

# Digests are looked up by their first bytes, which tell nothing of a key, and then compared in
# constant time.
_BUCKET_BYTES = 2


class Keys:
    """Digests of all tenants' keys. Without tenants, everyone is let in as tenant ""."""

    def __init__(self, tenants: Iterable[TenantConfig] = ()) -> None:
        self._buckets: dict[bytes, list[tuple[bytes, str]]] = {}
        self._open = True
        for tenant in tenants:
            self._open = False
            for text in tenant.keys:
                digest = digest_in(text)
                bucket = self._buckets.setdefault(digest[:_BUCKET_BYTES], [])
                bucket.append((digest, tenant.name))

    def tenant_of(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header. Raises Unauthenticated."""
        if self._open:
            return ""
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
        digest = digest_of(key)
        for known, tenant in self._buckets.get(digest[:_BUCKET_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return tenant
        raise Unauthenticated("unknown API key")


EVERYONE = Keys()
