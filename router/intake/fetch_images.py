"""Fetches images from http and https URLs that clients name.

To prevent request forgery (SSRF), images are fetched only from configured hosts, and only at public
addresses: a name is resolved once, its addresses are checked, and the connection goes to one of
them. Each redirect is checked like the first URL. Size, time and redirects are limited.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from pdserve.errors import InvalidRequest, UnsupportedField
from pdserve.model.images import MAX_IMAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp.abc import ResolveResult

FETCH_TIMEOUT_S = 10.0
MAX_REDIRECTS = 3
# At a time, over all requests. Others wait, within their timeout.
MAX_FETCHES = 16
_CHUNK = 1 << 16
# Addresses that contain an IPv4 address, which a gateway may translate to.
_NAT64 = IPv6Network("64:ff9b::/96")
# For gateways inside of one network (RFC 8215).
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")


def is_public(address: str) -> bool:
    """Return True if an IP address belongs to the public internet, and not to this machine, its
    network, or a special purpose such as the metadata services of clouds."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found in _LOCAL_NAT64 or found.is_site_local:
            return False
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is None and found in _NAT64:
            inner = IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


class _CheckedResolver(AbstractResolver):
    """Resolves names to the addresses that `allows` permits. aiohttp connects to these, and does
    not resolve again."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        allowed = [x for x in found if self._allows(x["host"])]
        if not allowed:
            raise OSError(f"{host} has no public address")
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


class ImageFetcher:
    """An async context manager. `hosts`: as router.images.url_hosts. `allows` decides which
    addresses may be connected to."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        allows: Callable[[str], bool] = is_public,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        self._hosts = [x.lower() for x in hosts]
        self._allows = allows
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self._exits = AsyncExitStack()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> ImageFetcher:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=_CheckedResolver(self._allows), use_dns_cache=False, force_close=True
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A compressed answer could grow without limit.
            auto_decompress=False,
            headers={"accept": "image/*", "accept-encoding": "identity"},
        )
        await self._exits.enter_async_context(self._session)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def fetch(self, url: str, field: str) -> bytes:
        """Return the bytes at `url`. Raises UnsupportedField if URLs are not fetched here, and
        InvalidRequest; both name `field`."""
        if not self._hosts:
            text = (
                f"'{field}' is not supported: this router fetches no images; send a data URL, or "
                "set router.images.url_hosts"
            )
            raise UnsupportedField(text, field=field)
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                return await self._fetch(url)
        except TimeoutError:
            reason = f"was not answered within {self._timeout_s:g} s"
        except ValueError as error:
            reason = str(error)
        except (OSError, aiohttp.ClientError):
            # Without the cause, which would reveal the router's network to a client.
            reason = "cannot be fetched"
        raise InvalidRequest(f"'{field}' {reason}", field=field)

    async def _fetch(self, address: str) -> bytes:
        # The object that aiohttp connects by: no second parser may see another host in it.
        url = URL(address)
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            async with self._session.get(url, allow_redirects=False) as answer:
                if answer.status in (301, 302, 303, 307, 308):
                    url = url.join(URL(answer.headers.get("location", "")))
                    continue
                if answer.status != 200:
                    raise ValueError(f"was answered with status {answer.status}")
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise ValueError("was answered with a compressed body")
                return await self._read(answer)
        raise ValueError(f"leads to more than {MAX_REDIRECTS} redirects")

    def _check(self, url: URL) -> None:
        host = (url.raw_host or "").rstrip(".").lower()
        if url.scheme not in ("http", "https") or not host:
            raise ValueError("leads to an address that is not http or https")
        if url.user is not None or url.password is not None:
            raise ValueError("has a user name or password")
        if not any(_fits(host, pattern) for pattern in self._hosts):
            raise ValueError(f"is on host {host[:128]!r}, from which no images are fetched")
        # aiohttp does not resolve an IP address, so the resolver does not see it.
        try:
            allowed = self._allows(host)
        except ValueError:
            return
        if not allowed:
            raise ValueError("is at an address that is not public")

    @staticmethod
    async def _read(answer: aiohttp.ClientResponse) -> bytes:
        found = bytearray()
        async for chunk in answer.content.iter_chunked(_CHUNK):
            found += chunk
            if len(found) > MAX_IMAGE_BYTES:
                raise ValueError(f"has more than {MAX_IMAGE_BYTES} bytes")
        return bytes(found)


def _fits(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in ("*", host)
