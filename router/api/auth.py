"""API keys of tenants and administrators. Only digests are kept; no key is logged or sent back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.config import AccessConfig, is_exposed
from pdserve.errors import PermissionDenied, Unauthenticated
from pdserve.security.keys import digest_in, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TenantConfig


class Keys:
    """Digests of all API keys. `is_open`: no tenants are configured, and every client is tenant "".
    `admin_is_open`: administrators cannot authenticate over HTTP either, so every client on this
    machine is one."""

    def __init__(
        self,
        tenants: Iterable[TenantConfig] = (),
        access: AccessConfig | None = None,
        *,
        http_host: str = "localhost",
    ) -> None:
        access = access or AccessConfig()
        tenants = tuple(tenants)
        self.is_open = not tenants
        self.use(tenants, access.admin_keys)
        self._is_exposed = is_exposed(http_host)
        self.admin_is_open = self.is_open and not (access.admin_keys or access.tls.is_mutual)

    def use(self, tenants: Iterable[TenantConfig], admin_keys: Iterable[str]) -> None:
        """Use these keys from now on."""
        # A plain dictionary is safe: the time of a lookup may reveal a part of a digest, but a
        # digest reveals nothing about its key.
        self._tenants = {digest_in(text): x.name for x in tenants for text in x.keys}
        self._admins = {digest_in(text) for text in admin_keys}

    def tenant_of(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header. Raises Unauthenticated."""
        if self.is_open:
            return ""
        tenant = self._tenants.get(_digest(authorization))
        if tenant is None:
            raise Unauthenticated("unknown API key")
        return tenant

    def check_admin(self, authorization: str | None) -> None:
        """Check for an administrator's key. Raises Unauthenticated or PermissionDenied."""
        keys = "router.access.admin_keys"
        if self.admin_is_open:
            if self._is_exposed:
                text = "needs keys where other machines can reach router.http.host"
                raise PermissionDenied(f"this {text}: set {keys}")
        elif _digest(authorization) not in self._admins:
            raise PermissionDenied(f"a key of {keys} is required")


def _digest(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
    return digest_of(key)


EVERYONE = Keys()
