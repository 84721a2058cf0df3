"""API keys of tenants and administrators. No key is kept, logged or repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.config import AccessConfig
from pdserve.errors import PermissionDenied, Unauthenticated
from pdserve.security.keys import digest_in, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TenantConfig


class Keys:
    """Digests of all keys. Without tenants, everyone is let in as tenant "": `is_open`. Without any
    way to authenticate, everyone is an administrator: `admin_is_open`."""

    def __init__(
        self, tenants: Iterable[TenantConfig] = (), access: AccessConfig | None = None
    ) -> None:
        access = access or AccessConfig()
        tenants = tuple(tenants)
        self.is_open = not tenants
        # How long a look-up takes tells something of a digest, which tells nothing of a key.
        self._tenants = {digest_in(text): x.name for x in tenants for text in x.keys}
        self._admins = {digest_in(text) for text in access.admin_keys}
        self.admin_is_open = self.is_open and not access.asks_for_roles

    def tenant_of(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header. Raises Unauthenticated."""
        if self.is_open:
            return ""
        tenant = self._tenants.get(_digest(authorization))
        if tenant is None:
            raise Unauthenticated("unknown API key")
        return tenant

    def check_admin(self, authorization: str | None) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        if not self.admin_is_open and _digest(authorization) not in self._admins:
            raise PermissionDenied("a key of router.access.admin_keys is required")


def _digest(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
    return digest_of(key)


EVERYONE = Keys()
