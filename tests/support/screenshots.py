"""Make the pictures of README.md and docs/console.md with chromium: `make screenshots`.

README.md shows a chat with the model that `make run` serves. The other pictures show fake engines
with steps about as long as those of an 8B model on one GPU, and two tenants, one of them over its
limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from PIL import Image
from playwright.async_api import async_playwright

from benchmarks.client import HttpTarget, exactly
from benchmarks.errors import TargetError
from pdserve.security.keys import hash_key, new_key
from tests.support.pdserve_up import up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from playwright.async_api import Page

TARGET = Path(__file__).resolve().parents[2] / "docs" / "console"
ENGINE = {"step_s": 0.011, "prefill_s": 0.00012, "decode_s": 0.0004, "transfer_s": 0.03}
CLIENTS = 22
TRAFFIC_S = 45.0
SIZE = (1280, 720)
QUESTIONS = ("What is the capital of France?", "Name two rivers that flow through the country.")
ANSWER_MS = 60_000.0


def configuration(folder: Path, admin_key: str, keys: dict[str, str]) -> Path:
    (folder / "token").write_text("a-token-for-the-pictures-alone-1")
    access = {"worker_token_file": str(folder / "token")}
    limits = {"acme": {}, "globex": {"requests_per_minute": 120}}
    tenants = [{"name": x, "keys": [hash_key(keys[x])], **limits[x]} for x in keys]
    access_of_router = {**access, "admin_keys": [hash_key(admin_key)]}
    router = {"access": access_of_router, "tenants": tenants, "prices": {"cpu": 0.04}}
    worker = {
        "access": access,
        "engine": "fake",
        "engine_args": ENGINE,
        "model_names": ["demo-8b"],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"router": router, "worker": worker}))
    return path


async def keep_asking(url: str, key: str, number: int) -> None:
    target, chance = HttpTarget(url, key), random.Random(number)
    try:
        model = await target.model()
        while True:
            length = min(3000, 40 + int(chance.lognormvariate(5.6, 1.1)))
            prompt = [chance.randrange(16, 80) for _ in range(length)]
            request = target.prepare(model, "", prompt, exactly(chance.randrange(10, 130)))
            try:
                async for _ in target.stream(request):
                    pass
                await asyncio.sleep(chance.uniform(0.0, 0.5))
            except TargetError:
                await asyncio.sleep(chance.uniform(2.0, 5.0))
    finally:
        await target.aclose()


@contextlib.asynccontextmanager
async def page_of(ready: dict[str, Any], height: int = SIZE[1]) -> AsyncIterator[Page]:
    """Open the console in a browser, and close the browser."""
    async with async_playwright() as tool:
        chromium = shutil.which("chromium")
        browser = await tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            page = await browser.new_page(viewport={"width": SIZE[0], "height": height})
            await page.goto(f"{ready['http']}/console")
            yield page
        finally:
            await browser.close()


async def save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(await page.screenshot()))
    few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few.save(TARGET / f"{name}.png", optimize=True)


async def take_chat(ready: dict[str, Any]) -> None:
    async with page_of(ready, height=560) as page:
        await page.locator("nav a[href='#chat']").click()
        for number, question in enumerate(QUESTIONS, 1):
            await page.get_by_label("Message").fill(question)
            await page.keyboard.press("Control+Enter")
            told = page.get_by_text("KV blocks over").or_(page.get_by_text(" tokens · "))
            await told.nth(number - 1).wait_for(timeout=ANSWER_MS)
        await page.mouse.move(0, 0)
        await save(page, "chat")


async def take(ready: dict[str, Any], admin_key: str, keys: dict[str, str]) -> None:
    async with page_of(ready) as page, asyncio.TaskGroup() as asking:
        names = [*keys] * CLIENTS
        tasks = [
            asking.create_task(keep_asking(ready["http"], keys[names[i]], i))
            for i in range(CLIENTS)
        ]
        await page.get_by_label("Key").fill(admin_key)
        await page.keyboard.press("Enter")
        await asyncio.sleep(TRAFFIC_S)

        async def show(view: str) -> None:
            await page.locator(f"nav a[href='#{view}']").click()
            await page.mouse.move(0, 0)
            await asyncio.sleep(3.0)
            await save(page, view)

        for view in ("overview", "requests", "flow", "goodput", "verdict"):
            await show(view)
        await page.emulate_media(color_scheme="dark")
        await show("workers")
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[dict[str, Any]]:
    with up(folder, *options) as running:
        yield running.wait_until_serving()
        running.send(signal.SIGINT)
        running.wait()


def main() -> None:
    admin_key, keys = new_key(), {"acme": new_key(), "globex": new_key()}
    TARGET.mkdir(exist_ok=True)
    real = ("--engine", "vllm", "--model", "smollm2")
    with tempfile.TemporaryDirectory() as name, serving(Path(name), *real) as ready:
        asyncio.run(take_chat(ready))
    with tempfile.TemporaryDirectory() as name:
        config = str(configuration(Path(name), admin_key, keys))
        options = ("--config", config, "--prefill", "2", "--decode", "3")
        with serving(Path(name), *options) as ready:
            asyncio.run(take(ready, admin_key, keys))


if __name__ == "__main__":
    main()
