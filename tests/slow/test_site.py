"""The documentation's site. Every page can be reached from the first, every link leads somewhere,
and in a browser pages fit their window and load nothing from another host."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.support.commands import ROOT, copy_sources
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Page, Route

SITE = ROOT / ".venv-site"
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    not (SITE / "installed").exists(), reason="needs .venv-site, which `make test-tools` makes"
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
BUILD_S = 300.0
URL = "http://site.test/"
LINK = re.compile(r'<(?:a|link|script|img)\b[^>]* (?:href|src)="([^"]*)"')


def build(sources: Path, target: Path) -> subprocess.CompletedProcess[str]:
    # The environment is used as it is: -o keeps make from renewing it.
    return subprocess.run(
        ["make", "-o", ".venv-site/installed", "site", f"SITE_DIR={target}"],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site") / "site"
    built = build(ROOT, target)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


def pages(site: Path) -> set[str]:
    return {str(x.relative_to(site)) for x in site.rglob("*.html")}


def links(site: Path, page: str) -> set[str]:
    """Return the paths, with their anchors, of what a page links to and loads."""
    found = LINK.findall((site / page).read_text("utf-8"))
    absolute = {urljoin(URL + page, unquote(unescape(x))) for x in found}
    return {x.removeprefix(URL) for x in absolute if x.startswith(URL)}


def test_every_page_is_reached_and_every_link_has_a_target(site: Path) -> None:
    reached, left = set[str](), {"index.html"}
    while left:
        page = left.pop()
        reached.add(page)
        for link in links(site, page):
            path, anchor = urlsplit(link).path, urlsplit(link).fragment
            assert (site / path).is_file(), f"{page}: {link}"
            if anchor:
                assert f'id="{anchor}"' in (site / path).read_text("utf-8"), f"{page}: {link}"
            if path.endswith(".html") and path not in reached:
                left.add(path)
    assert reached | {"search.html"} == pages(site)
    assert {f"docs/{x.stem}.html" for x in (ROOT / "docs").glob("*.md")} < reached


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    copy_sources(sources)
    (sources / ".venv-site").symlink_to(SITE)
    page = sources / "docs" / "models.md"
    page.write_text(page.read_text("utf-8") + "\n[a](nowhere.md) [b](clients.md#nowhere)\n")
    built = build(sources, tmp_path / "site")
    assert built.returncode != 0
    assert "models.md" in built.stderr
    assert "'nowhere.md'" in built.stderr
    assert "'nowhere'" in built.stderr


@pytest.fixture(params=[390, 1280])
async def page(site: Path, request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    """A window of this width. Fails if a page loads anything that is not a file of the site."""
    playwright: Any = pytest.importorskip("playwright.async_api")
    elsewhere: list[str] = []

    async def answer(route: Route) -> None:
        url = re.sub(r"[?#].*", "", route.request.url)
        path = site / url.removeprefix(URL)
        if url.startswith(URL) and path.is_file():
            await route.fulfill(path=path)
        else:
            elsewhere.append(url)
            await route.abort()

    async with playwright.async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": request.param, "height": 800})
        await page.route("**/*", answer)
        yield page
        await browser.close()
    assert elsewhere == []


@needs_chromium
async def test_every_page_fits_its_window(site: Path, page: Page) -> None:
    wide = {}
    for name in sorted(pages(site) - {"index.html"}):  # index.html leads to README.html
        await page.goto(URL + name)
        by = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        if more := await page.evaluate(by):
            wide[name] = more
    assert wide == {}


@needs_chromium
@pytest.mark.parametrize(
    ("words", "title"),
    [("reject_factor", "Configuration"), ("GenerateRequest", "gRPC API")],
)
async def test_search_finds_a_word(page: Page, words: str, title: str) -> None:
    await page.goto(f"{URL}search.html?q={words}")
    found = page.locator("#search-results li a", has_text=title)
    await found.first.wait_for(timeout=WAIT_S * 1000)
