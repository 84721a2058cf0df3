"""The console in a real browser, over live traffic on real vLLM. Every view shows the traffic, an
administrator can act, and nothing that a client sends becomes markup."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import threading
from typing import TYPE_CHECKING, Any

import openai
import pytest
import yaml

from pdserve.security.keys import hash_key, new_key
from tests.support.pdserve_up import up
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from playwright.async_api import Page

playwright = pytest.importorskip("playwright.async_api", reason="needs the package playwright")
axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="needs the package axe")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
expect = playwright.expect
expect.set_options(timeout=WAIT_S * 1000)

ADMIN_KEY, KEY = new_key(), new_key()
ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
VIEWS = ("overview", "requests", "workers", "sessions", "flow", "goodput", "verdict", "chat")


class Traffic:
    """Send one request after another as the tenant whose name is hostile."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=KEY, max_retries=0) as client:
            # Each session stays with one decode worker; the requests between go to the other.
            for headers in itertools.cycle(({"x-session-id": ATTACK}, {}, {})):
                if self._stopped.is_set():
                    break
                messages: Any = [{"role": "user", "content": ATTACK + " leaves" * 40}]
                try:
                    client.chat.completions.create(
                        model=ATTACK,
                        messages=messages,
                        max_tokens=16,
                        temperature=0.0,
                        extra_headers=headers,
                    )
                except openai.APIError:  # a worker was killed
                    self._stopped.wait(0.2)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(WAIT_S)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("console")
    config = folder / "config.yaml"
    router = {
        "access": {"admin_keys": [hash_key(ADMIN_KEY)]},  # the workers' token is made
        "tenants": [{"name": ATTACK, "keys": [hash_key(KEY)]}],
        "on_demand_models": [ATTACK],
    }
    config.write_text(yaml.safe_dump({"router": router}))
    pools = ("--prefill", "1", "--decode", "2", "--set", "router.policy=least_loaded")
    words = ("--engine", "vllm", "--config", str(config), *pools, "--model-name", ATTACK)
    with up(folder, *words) as running:
        ready = running.wait_until_serving(within_s=START_S)
        traffic = Traffic(ready["http"])
        yield ready
        traffic.stop()
        running.send(signal.SIGINT)
        assert running.wait() == 0


@pytest.fixture
async def page(service: dict[str, Any]) -> AsyncIterator[Page]:
    """The console after the administrator has given the key; it said no error and asked nobody
    else for anything."""
    said: list[str] = []
    async with playwright.async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
        page.on(
            "request", lambda x: None if x.url.startswith(service["http"]) else said.append(x.url)
        )
        await page.goto(f"{service['http']}/console")
        await page.get_by_label("Key").fill(ADMIN_KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_have_class("live")
        yield page
        assert await page.title() != "owned"
        await browser.close()
    # The first call has no key yet, and chromium logs its status.
    assert [text for text in said if "status of 401" not in text] == []


async def opened(page: Page, view: str) -> None:
    await page.locator(f"nav a[href='#{view}']").click()
    await expect(page.locator(f"nav a[href='#{view}']")).to_have_attribute("aria-current", "page")


async def test_the_first_view_is_of_the_last_minutes(page: Page) -> None:
    await expect(page.locator("nav a[aria-current]")).to_have_text("Overview")
    for title, figure in (
        ("Requests that ended", r"\d/s"),
        ("Tokens of answers", r"\d/s"),
        ("TTFT", r"\d m?s · [\d.]+ m?s"),
        ("ITL", r"\d m?s · [\d.]+ m?s"),
        ("KV cache", r"\d % · \d+ %"),
        ("Workers", "^3$"),
    ):
        card = page.locator("article", has=page.get_by_role("heading", name=title))
        await expect(card.locator(".figure")).to_have_text(re.compile(figure))


async def test_requests_are_shown_and_explained(page: Page) -> None:
    await opened(page, "requests")
    row = page.locator("tbody tr", has=page.locator("i.decode")).filter(has_text="decode-").first
    await expect(row).to_contain_text("prefill-0 → decode-")
    await expect(row).to_contain_text(ATTACK)
    await page.get_by_label("Outcome").select_option("finished")
    await page.get_by_role("button", name="Pause").click()
    await row.get_by_role("button").focus()
    await page.keyboard.press("Enter")
    dialog = page.locator("#detail")
    await expect(dialog).to_contain_text("prefill on prefill-0, decode on decode-")
    await expect(dialog.locator("table tbody tr")).to_have_count(3)
    await expect(dialog.locator("dl")).to_contain_text("transfer blocks")
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    name = await row.get_by_role("button").get_attribute("title")
    assert name is not None
    await page.get_by_role("button", name="Continue").click()
    await page.get_by_label("Id").fill(name.removeprefix("chatcmpl-"))
    await expect(page.locator("#view tbody tr")).to_have_count(1)
    await page.get_by_label("Id").fill("")
    await page.get_by_label("Outcome").select_option("refused")
    await expect(page.locator("#view tbody tr")).to_have_count(0)


async def test_a_request_whose_client_left_is_aborted_and_no_failure(
    service: dict[str, Any], page: Page
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service['http']}/v1", api_key=KEY) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(
            model=ATTACK,
            messages=messages,
            stream=True,
            max_tokens=4000,  # the answer cannot end before the client leaves
            extra_body={"ignore_eos": True},
        )
        # Prefill sends the first token, maybe before a decode worker is chosen. The third comes
        # from one.
        texts = 0
        async for chunk in stream:
            texts += bool(chunk.choices and chunk.choices[0].delta.content)
            if texts == 3:
                break
        assert texts == 3
        await stream.close()
    await opened(page, "requests")
    await page.get_by_label("Outcome").select_option("aborted")
    row = page.locator("#view tbody tr")
    await expect(row).to_have_count(1)
    await expect(row).to_contain_text("prefill-0 → decode-")
    await expect(row.locator("td").nth(6)).to_have_text(re.compile(r"\d m?s"))  # TTFT
    await expect(row.locator("i.aborted")).to_be_visible()
    await expect(row.locator(".mark")).to_have_text("aborted")
    await page.get_by_label("Outcome").select_option("failed")
    await expect(row).to_have_count(0)
    await opened(page, "goodput")
    await expect(page.locator("#view")).to_contain_text("None.")  # refused and failed


async def test_workers_show_their_steps(page: Page) -> None:
    await opened(page, "workers")
    on_demand = page.get_by_role("list", name="Models that are started on demand")
    await expect(on_demand).to_have_text(f"{ATTACK}: has workers")
    for name, kind in (("prefill-0", "prompt"), ("decode-0", "decode")):
        lane = page.locator(f".lane[data-worker='{name}']")
        await expect(lane).to_contain_text("ready")
        steps = re.compile(rf"{name}: [1-9].* [1-9]\d* {kind} tokens")
        await expect(lane.locator("canvas")).to_have_attribute("aria-label", steps)


async def test_sessions_show_what_their_turns_had_cached(page: Page) -> None:
    await opened(page, "sessions")
    row = page.locator(".sessions tbody tr")
    await expect(row).to_have_count(1)
    await expect(row.locator("th")).to_have_text(ATTACK)
    await expect(row.locator("td").nth(3)).to_have_text(re.compile(r"[1-9]\d*"))  # turns
    await expect(row.locator("td").nth(5)).to_have_text(re.compile(r"[1-9]\d* %"))  # cached


async def test_flow_goodput_and_verdict_come_from_the_same_requests(page: Page) -> None:
    await opened(page, "flow")
    for i in range(2):
        await expect(page.locator(".flow tbody td").nth(i)).to_contain_text("B/s")
    await opened(page, "goodput")
    await expect(page.locator("tbody tr").first).to_contain_text(ATTACK)
    await expect(page.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"\d+ of [1-9]\d* requests were good")
    )
    await opened(page, "verdict")
    await expect(page.locator("article")).to_contain_text("1 prefill")
    await expect(page.locator("article")).to_contain_text("Measured in the last minute")


async def test_a_chat_draws_its_own_waterfall(page: Page) -> None:
    await opened(page, "chat")
    await page.get_by_label("Tenant's key").fill(KEY)
    await page.get_by_label("Message").fill(ATTACK)
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".turn").last).to_contain_text("KV blocks over")
    await expect(page.locator(".turn .bar i.decode")).to_be_visible()
    await expect(page.locator(".turn.user")).to_have_text(ATTACK)
    await page.get_by_label("Message").fill("Which time is it?")
    await page.locator("summary", has_text="Tools as JSON").click()
    await page.get_by_label("Tools").fill("[")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".chat .error").last).to_contain_text("JSON")


async def test_a_chat_shows_reasoning_and_calls_of_tools(page: Page) -> None:
    await opened(page, "chat")
    await page.get_by_label("Tenant's key").fill(KEY)
    await page.get_by_label("Reasoning").select_option("high")
    await page.locator("summary", has_text="Tools as JSON").click()
    await page.get_by_role("button", name="Example").click()
    await page.get_by_label("Message").fill("What is the weather of Oslo and of Rome?")
    await page.get_by_role("button", name="Send", exact=True).click()
    answer = page.locator(".turn").nth(1)
    await expect(answer.locator("details .text")).to_contain_text("call get_weather twice")
    await expect(answer.locator("pre")).to_have_text(
        [f'calls get_weather({{"city": "{x}"}})' for x in ("Oslo", "Rome")]
    )
    await expect(answer).to_contain_text("KV blocks over")
    await expect(answer.locator(".bar i.prefill")).to_be_visible()
    await expect(answer.locator(".bar i.decode")).to_be_visible()
    for i, weather in enumerate(("rain", "snow")):
        await answer.get_by_label("Result of get_weather").nth(i).fill(weather)
    await answer.get_by_role("button", name="Send to the model").click()
    await expect(page.locator(".turn").last).to_contain_text("weather of Rome is snow")
    await expect(page.locator(".turn .bar i.decode")).to_have_count(2)


async def test_an_administrator_drains_a_worker_and_takes_it_back(page: Page) -> None:
    await opened(page, "workers")
    lane, dialog = page.locator(".lane[data-worker='decode-1']"), page.locator("#ask")
    for act, state in (("Drain", "draining"), ("Undrain", "ready")):
        await lane.get_by_role("button", name=act, exact=True).click()
        await dialog.get_by_role("button", name=act, exact=True).click()
        await expect(dialog.get_by_role("status")).to_contain_text("done")
        await expect(lane.locator(".mark")).to_have_text(state)
        await dialog.get_by_role("button", name="Close").click()


async def test_an_administrator_changes_the_role_of_a_worker(page: Page) -> None:
    await opened(page, "workers")
    lane, dialog = page.locator(".lane[data-worker='decode-1']"), page.locator("#ask")
    for role in ("prefill", "decode"):
        act = lane.get_by_role("button", name=f"Make it {role}")
        await act.click()
        await dialog.get_by_role("button", name="Cancel").click()
        await expect(act).to_be_visible()  # nothing was done
        await act.click()
        await expect(dialog).to_contain_text(f"Make decode-1 a {role} worker")
        await dialog.get_by_role("button", name=f"Make it {role}").click()
        await expect(dialog.get_by_role("status")).to_contain_text("done in")
        await dialog.get_by_role("button", name="Close").click()
        await expect(lane).to_contain_text(f"{role}, ")
        await expect(lane.locator(".mark")).to_have_text("ready")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(page: Page, scheme: Any) -> None:
    await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for view in VIEWS:
        await opened(page, view)
        await asyncio.sleep(0.5)  # for a few rows
        found = await axe.Axe().run(page)
        assert found.violations_count == 0, f"{view}: {found.generate_report()}"


async def test_a_phone_scrolls_in_one_direction(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    for view in VIEWS:
        await opened(page, view)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390, view


async def test_without_the_router_nothing_is_known_of_workers(
    service: dict[str, Any], page: Page
) -> None:
    await opened(page, "workers")
    mark = page.locator(".lane[data-worker='decode-1'] .mark")
    await expect(mark).to_have_text("ready")
    os.kill(service["routers"][0]["pid"], signal.SIGSTOP)
    try:
        await expect(mark).to_have_text("not known")
        await expect(page.locator("body")).to_have_class("stale")
    finally:
        os.kill(service["routers"][0]["pid"], signal.SIGCONT)
    await expect(mark).to_have_text("ready")
    await expect(page.locator("body")).to_have_class("")


async def test_a_killed_worker_is_seen(service: dict[str, Any], page: Page) -> None:
    await opened(page, "workers")
    mark = page.locator(".lane[data-worker='decode-1'] .mark")
    await expect(mark).to_have_text("ready")
    pid = next(x["pid"] for x in service["workers"] if x["worker_id"] == "decode-1")
    os.kill(service["pid"], signal.SIGSTOP)  # the supervisor would start it again
    try:
        os.kill(pid, signal.SIGKILL)
        await expect(mark).to_have_text(re.compile("connecting|lost"))
    finally:
        os.kill(service["pid"], signal.SIGCONT)
