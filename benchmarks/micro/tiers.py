"""TTFT of prompts that the KV cache has evicted, with KV tiers and without.

Each variant is `pdserve up` with one prefill and one decode worker. All variants run at the same
time. The prompts have one length, and together twice the size of the prefill worker's KV cache.
They are sent one at a time, each to every variant before the next prompt, in several passes. The
first pass computes them and is not counted. `disk` has host memory for two prompts, so most are
loaded from files (from the page cache, if they fit there). Without --model it creates and serves a
Llama of 205 million random parameters.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError, TargetError
from benchmarks.micro.serving import serving
from benchmarks.micro.unloaded import make_model
from benchmarks.stats import alternate, compare

if TYPE_CHECKING:
    import argparse

    from benchmarks.micro.serving import Serving
    from benchmarks.progress import Progress

VARIANTS: Final = ("no tiers", "host", "disk")
PROMPTS, LENGTH, TOKENS = 6, 2048, 3
PROMPT_BYTES: Final = LENGTH * 36 << 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options. `--rounds` is the number of passes."""
    parser.add_argument("--model", default="", metavar="DIR", help="a model directory")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    services: dict[str, Serving] = {}

    async def measure(name: str, number: int) -> float:
        progress.step(f"pass {number // PROMPTS} of {args.rounds}, {name}")
        prompt = services[name].prompt(random.Random(number % PROMPTS), LENGTH)
        try:
            at_ms, _ = await services[name].ask(prompt, TOKENS)
        except TargetError as error:
            raise BenchError(f"{name}: {error}") from None
        return at_ms[0]

    async with AsyncExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-")))
        model = args.model
        if not model:
            progress.step("making a model of 205 million parameters")
            model = str(make_model(folder / "llama-205m"))
        for name in VARIANTS:
            progress.step(f"starting {name}")
            worker, up = _worker(name, model, folder / name), {"cores_per_worker": 1}
            starting = serving(name, folder / name, worker, up, policy="least_loaded")
            services[name] = await ending.enter_async_context(starting)
        asked = alternate(VARIANTS, (args.rounds + 1) * PROMPTS, measure, warm_up=False)
        rounds = [times async for times in asked]
    first, again = (compare(part, VARIANTS[0]) for part in (rounds[:PROMPTS], rounds[PROMPTS:]))
    return [
        {"variant": x, "first pass, ms": first[x][0], "ttft_ms": again[x][0], "ratio": again[x][1]}
        for x in VARIANTS
    ], []


def _worker(variant: str, model: str, folder: Path) -> dict[str, Any]:
    tiers: dict[str, Any] = {}
    if variant != "no tiers":
        held = 2 if variant == "disk" else 2 * PROMPTS
        tiers["host_gib"] = (held + 0.5) * PROMPT_BYTES / 2**30
    if variant == "disk":
        tiers["disk_path"] = str(folder / "tier")
        tiers["disk_gib"] = 2 * PROMPTS * PROMPT_BYTES / 2**30
    engine = {"kv_cache_memory_bytes": PROMPTS * PROMPT_BYTES // 2}
    return {"model": model, "engine_args": engine, "kv": {"tiers": tiers}}
