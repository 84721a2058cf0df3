"""API keys of tenants. No key is kept, logged or repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Unauthenticated
from pdserve.security.keys import digest_in, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TenantConfig


class Keys:
    """Digests of all tenants' keys. Without tenants, everyone is let in as tenant ""."""

    def __init__(self, tenants: Iterable[TenantConfig] = ()) -> None:
        tenants = tuple(tenants)
        self._is_open = not tenants
        # How long a look-up takes tells something of a digest, which tells nothing of a key.
        self._tenants = {digest_in(text): x.name for x in tenants for text in x.keys}

    def tenant_of(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header. Raises Unauthenticated."""
        if self._is_open:
            return ""
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
        tenant = self._tenants.get(digest_of(key))
        if tenant is None:
            raise Unauthenticated("unknown API key")
        return tenant


EVERYONE = Keys()
