"""Fetching images: which hosts and addresses are asked, and how much is read. Servers stand on
loopback, so these tests allow it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from pdserve.errors import InvalidRequest, UnsupportedField
from pdserve.model.images import MAX_IMAGE_BYTES
from router.intake.fetch_images import MAX_REDIRECTS, ImageFetcher, is_public
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Answer every path, and yield the address with the name `localhost`."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def picture(request: web.Request) -> web.Response:
    return web.Response(body=b"picture of " + request.path.encode())


def anywhere(_: str) -> bool:
    return True


async def fetched(url: str, **options: object) -> bytes:
    values = {"hosts": ["localhost"], "allows": anywhere, "timeout_s": WAIT_S, **options}
    async with ImageFetcher(**values) as fetcher:  # type: ignore[arg-type]
        return await fetcher.fetch(url, "url")


async def refusal(url: str, **options: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetched(url, **options)
    assert caught.value.field == "url"
    return caught.value.message


async def test_a_picture_of_an_allowed_host_is_read() -> None:
    async with serving(picture) as url:
        assert await fetched(f"{url}/a.png") == b"picture of /a.png"


async def test_nothing_is_fetched_unless_a_host_is_configured() -> None:
    with pytest.raises(UnsupportedField, match="set router"):
        await fetched("http://localhost/", hosts=[])


@pytest.mark.parametrize(
    ("hosts", "url", "is_asked"),
    [
        (["a.test"], "http://a.test/", True),
        (["A.test"], "http://a.TEST./", True),
        (["*.a.test"], "http://b.a.test/", True),
        (["*"], "http://b.test/", True),
        (["a.test"], "http://b.a.test/", False),
        (["*.a.test"], "http://a.test/", False),
        (["*.a.test"], "http://nota.test/", False),
        (["a.test"], "http://a.test@b.test/", False),
        (["a.test"], "http://b.test#@a.test/", False),
        (["a.test"], "http://user:word@a.test/", False),
        (["a.test"], "ftp://a.test/", False),
        (["a.test"], "http:///a.test", False),
        (["a.test"], "http://[", False),
    ],
)
async def test_only_hosts_of_the_configuration_are_asked(
    hosts: list[str], url: str, is_asked: bool
) -> None:
    # Names under `test` do not exist, so those that are asked cannot be reached.
    assert ("cannot be fetched" in await refusal(url, hosts=hosts)) is is_asked


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f.1", "localhost", "0.0.0.0", "[::1]", "[::]"),
        *("[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "①②⑦.⓪.⓪.①", "127.0.0.1."),
    ],
)
async def test_no_spelling_of_a_private_address_is_connected_to(host: str) -> None:
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=b"secret")

    async with serving(note) as url:
        port = url.rpartition(":")[2]
        await refusal(f"http://{host}:{port}/", hosts=["*"], allows=is_public)
    assert asked == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((x, True) for x in ("8.8.8.8", "2606:4700::1", "64:ff9b::808:808")),
        *((x, False) for x in ("10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((x, False) for x in ("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")),
        *((x, False) for x in ("fe80::1%eth0", "fd00::1", "ff02::1", "2001:db8::1")),
        *((x, False) for x in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::")),
        *((x, False) for x in ("64:ff9b:1::808:808", "fec0::1")),
    ],
)
def test_addresses_of_the_public_internet_are_told_from_others(
    address: str, expected: bool
) -> None:
    assert is_public(address) is expected


async def test_a_redirect_is_checked_like_a_first_url() -> None:
    async def away(request: web.Request) -> web.Response:
        if request.path == "/moved":
            return web.Response(body=b"picture")
        raise web.HTTPFound({"/a": "/moved", "/b": "http://other.test/"}[request.path])

    async with serving(away) as url:
        assert await fetched(f"{url}/a") == b"picture"
        assert "is on host 'other.test'" in await refusal(f"{url}/b")

        def is_name(host: str) -> bool:
            return host != "127.0.0.1"

        assert "cannot be fetched" in await refusal(f"{url}/a", allows=is_name)


async def test_redirects_are_counted() -> None:
    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound("/again")

    async with serving(away) as url:
        assert f"more than {MAX_REDIRECTS} redirects" in await refusal(url)


async def test_no_more_than_an_image_is_read() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2 * MAX_IMAGE_BYTES >> 20):
            await response.write(bytes(1 << 20))
        return response

    async with serving(endless) as url:
        assert f"more than {MAX_IMAGE_BYTES} bytes" in await refusal(url)


async def test_an_answer_that_does_not_come_is_not_awaited() -> None:
    is_over = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"pic")
        await is_over.wait()
        return response

    async with serving(silent) as url:
        assert "within 0.2 s" in await refusal(url, timeout_s=0.2)
        is_over.set()


async def test_a_compressed_answer_is_refused() -> None:
    async def squeezed(request: web.Request) -> web.Response:
        return web.Response(body=b"x", headers={"content-encoding": "gzip"})

    async with serving(squeezed) as url:
        assert "compressed" in await refusal(url)


async def test_an_error_of_the_server_is_told() -> None:
    async def missing(request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async with serving(missing) as url:
        assert "status 404" in await refusal(url)
