"""Router CPU cost of an open console, and frame rate of its page.

One router and `--workers` fake engines, half of them for prefill, with `--streams` requests in
flight. Each of `--sessions` has a stored response before the measurement, and some continue it
throughout. The router's CPU per turn is measured with few and with all of them stored. Each round
measures the router's CPU time over `--seconds` without a viewer, and with one that reads all
events. If chromium and playwright are installed, the frames of the page are counted, with the work
of its main thread (scripts, style, layout and paint) for each. If engines and a browser without a
GPU share few cores, frames are late although the page itself is fast.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks.errors import TargetError
from benchmarks.micro.serving import serving
from benchmarks.service import processor_s
from benchmarks.stats import alternate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from benchmarks.progress import Progress

ALONE, VIEWED = "nobody looks", "one viewer"
PAGES = ("requests", "workers", "sessions")
TALKING = 16  # sessions that are in a turn
STEP_S = 0.25
# Counts frames for some seconds. Returns frames per second and the longest pause in ms.
_FRAMES = """(seconds) => new Promise((resolve) => {
  let count = 0, longest = 0, before = performance.now();
  const began = before;
  const next = (now) => {
    longest = Math.max(longest, now - before);
    before = now;
    if (now - began >= seconds * 1e3) resolve([count / (now - began) * 1e3, longest]);
    else { count++; requestAnimationFrame(next); }
  };
  requestAnimationFrame(next);
})"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=64, metavar="N", help="(64)")
    parser.add_argument("--streams", type=int, default=1000, metavar="N", help="in flight (1000)")
    parser.add_argument("--sessions", type=int, default=10_000, metavar="N", help="(10000)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="(10)")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    half = args.workers // 2
    async with AsyncExitStack() as ending:
        name = ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
        engine_args = {"step_s": STEP_S, "max_num_seqs": 2 * args.streams // half}
        worker = {"engine": "fake", "engine_args": engine_args}
        up = {"prefill": {"workers": half}, "decode": {"workers": half}}
        progress.step(f"starting {args.workers} workers")
        starting = serving(f"{half}P{half}D", Path(name), worker, up)
        served = await ending.enter_async_context(starting)
        router = served.ready["routers"][0]
        progress.step(f"{args.sessions} sessions")
        talks = await ending.enter_async_context(_Sessions(router, served.model.name))
        about_sessions = await talks.begin(args.sessions)

        async def keep_asking(number: int) -> None:
            while True:
                prompt = [16 + (number * 7 + i) % 64 for i in range(64 + number % 512)]
                with suppress(TargetError):
                    await served.ask(prompt, 20 + number % 100)

        async def measure(variant: str, number: int) -> dict[str, float]:
            progress.step(f"round {number + 1} of {args.rounds}, {variant}")
            async with asyncio.TaskGroup() as group:
                viewer = group.create_task(_view(router["http"])) if variant == VIEWED else None
                await asyncio.sleep(3.0)  # a new viewer first gets the past requests
                cpu_s, began = processor_s([router["pid"]]), time.perf_counter()
                await asyncio.sleep(args.seconds)
                used = (processor_s([router["pid"]]) - cpu_s) / (time.perf_counter() - began)
                if viewer is not None:
                    viewer.cancel()
            return {"router, % of a core": 100 * used}

        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(keep_asking(i)) for i in range(args.streams)]
            tasks += [asking.create_task(talks.keep_talking()) for _ in range(TALKING)]
            rounds = [x async for x in alternate([ALONE, VIEWED], args.rounds, measure)]
            frames = await _frames(router["http"], args, progress)
            for task in tasks:
                task.cancel()
    used = {x: [each[x]["router, % of a core"] for each in rounds] for x in (ALONE, VIEWED)}
    more = median(b - a for a, b in zip(used[ALONE], used[VIEWED], strict=True))
    rows = [{"": x, "router, % of a core": median(values)} for x, values in used.items()]
    return rows, [f"a viewer costs {more:.2f} % of a core", about_sessions, *frames]


class _Sessions:
    """Sessions that continue stored responses. State: the last response's id of each."""

    def __init__(self, router: Mapping[str, Any], model: str) -> None:
        self._url, self._pid, self._model = f"{router['http']}/v1/responses", router["pid"], model
        self._last: list[str] = []
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __aenter__(self) -> _Sessions:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def begin(self, count: int) -> str:
        """Begin `count` sessions. Return the cost of their turns as text."""
        few = min(count, TALKING)
        self._last = [await self._turn(f"session-{i}") for i in range(few)]
        before = await self._turn_ms()
        chunks = [range(few, count)[i : i + 500] for i in range(0, count - few, 500)]
        began = time.perf_counter()
        for chunk in chunks:
            self._last += await asyncio.gather(*(self._turn(f"session-{i}") for i in chunk))
        rate = (count - few) / (time.perf_counter() - began)
        after = await self._turn_ms()
        return (
            f"{count} sessions began at {rate:.0f} a second; a turn costs the router "
            f"{before:.2f} ms of CPU with {few} stored, {after:.2f} ms with all"
        )

    async def keep_talking(self) -> None:
        while True:
            index = random.randrange(len(self._last))
            name = f"session-{index}"
            try:
                self._last[index] = await self._turn(name, self._last[index])
            except aiohttp.ClientResponseError:  # it has become longer than the context
                self._last[index] = await self._turn(name)

    async def _turn_ms(self) -> float:
        """Return the router's CPU time for the next turn of some sessions, in milliseconds each."""
        cpu_s, turns = processor_s([self._pid]), 4
        for _ in range(turns):
            some = random.sample(range(len(self._last)), min(len(self._last), TALKING))
            asked = (self._turn(f"session-{i}", self._last[i]) for i in some)
            for index, last in zip(some, await asyncio.gather(*asked), strict=True):
                self._last[index] = last
        return 1e3 * (processor_s([self._pid]) - cpu_s) / (turns * len(some))

    async def _turn(self, session: str, previous: str | None = None) -> str:
        """Take a turn. Return the id of its response."""
        body = {"model": self._model, "input": "Which file is next?", "max_output_tokens": 1}
        if previous is not None:
            body["previous_response_id"] = previous
        headers = {"x-session-id": session}
        async with self._http.post(self._url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            return str((await answer.json())["id"])


async def _view(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.get(f"{url}/console/events") as response,
    ):
        async for _ in response.content.iter_any():
            pass


async def _frames(url: str, args: argparse.Namespace, progress: Progress) -> list[str]:
    chromium = shutil.which("chromium")
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return ["frames were not counted: that needs chromium and playwright"]
    found = []
    async with async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1920, "height": 1080})
        await page.goto(f"{url}/console")
        tools = await page.context.new_cdp_session(page)
        await tools.send("Performance.enable")

        async def used_ms() -> list[float]:
            metrics = (await tools.send("Performance.getMetrics"))["metrics"]
            found = {x["name"]: 1e3 * float(x["value"]) for x in metrics}
            return [found[f"{x}Duration"] for x in ("Task", "Script", "RecalcStyle", "Layout")]

        for view in PAGES:
            progress.step(f"frames of {view}")
            await page.goto(f"{url}/console#{view}")
            await asyncio.sleep(5.0)
            before = await used_ms()
            counted = [await page.evaluate(_FRAMES, args.seconds) for _ in range(args.rounds)]
            rate, longest_ms = (median(x[i] for x in counted) for i in (0, 1))
            frames = args.seconds * sum(x[0] for x in counted)
            pairs = zip(await used_ms(), before, strict=True)
            total, *parts = (f"{(b - a) / frames:.1f}" for b, a in pairs)
            found.append(
                f"{view}: {rate:.0f} frames/s, longest pause {longest_ms:.0f} ms, main thread"
                f" {total} ms a frame (scripts {parts[0]}, style {parts[1]}, layout {parts[2]})"
            )
        await browser.close()
    return found
