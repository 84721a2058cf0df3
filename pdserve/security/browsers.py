"""Protection from web pages of other origins in the browser of a user who can reach this
service."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdserve.errors import PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Collection

_KNOWN_HOSTS = 1024


class BrowserGuard:
    """Rejects requests from pages of other origins, and with `checks_host` requests with unknown
    Host headers.

    An attacker's page can make its own name resolve to our address (DNS rebinding). It then has our
    origin, and only the Host header reveals it. Rebinding needs a name that the attacker owns, so
    IP addresses, localhost and this machine's name are accepted in addition to `allowed_hosts`.
    """

    def __init__(
        self,
        origins: Collection[str] = (),
        allowed_hosts: Collection[str] = (),
        *,
        checks_host: bool = True,
    ) -> None:
        self.use_origins(origins)
        self._checks_host = checks_host and "*" not in allowed_hosts
        own = ("localhost", socket.gethostname())
        self._names = frozenset(name.lower() for name in (*own, *allowed_hosts))
        # Accepted Host headers, unparsed: a look-up is faster than parsing.
        self._known: set[str | None] = {None}  # None is safe: browsers always send the header

    def use_origins(self, origins: Collection[str]) -> None:
        """Allow pages of these origins from now on."""
        self._origins, self._any_origin = frozenset(origins), "*" in origins

    def allows_origin(self, origin: str) -> bool:
        """Return True if pages of `origin` may read answers (CORS)."""
        return self._any_origin or origin in self._origins

    def check(self, host: str | None, origin: str | None) -> None:
        """Check the headers Host and Origin of a request. Raises PermissionDenied."""
        if (
            origin is not None
            and not self.allows_origin(origin)
            and origin.partition("://")[2] != host
        ):
            raise PermissionDenied(
                f"pages of the origin {origin!r} are not allowed: see router.http.cors_origins",
                field="origin",
            )
        if self._checks_host and host not in self._known:
            self._check_host(host or "")

    def _check_host(self, host: str) -> None:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if name not in self._names:
            try:
                ipaddress.ip_address(name)
            except ValueError:
                raise PermissionDenied(
                    f"the host {host!r} is not one of this service: without API keys, name it in "
                    "router.http.allowed_hosts",
                    field="host",
                ) from None
        if len(self._known) < _KNOWN_HOSTS:
            self._known.add(host)
