"""TTFT of prompts that the KV cache has evicted, with KV tiers and without.

Each variant is `pdserve up` with one prefill and one decode worker. Prompts of one length, together
twice as large as the prefill worker's KV cache, are asked in turn, one at a time, in several
passes; the first pass computes them and is not counted. `disk` has host memory for two prompts, so
that most come from files (and those from the page cache, if they fit). It serves a Llama of 205
million random parameters.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError, TargetError
from benchmarks.micro.serving import serving
from benchmarks.micro.unloaded import make_model

if TYPE_CHECKING:
    import argparse

    from benchmarks.progress import Progress

VARIANTS: Final = ("no tiers", "host", "disk")
PROMPTS, LENGTH, TOKENS = 6, 2048, 3
PROMPT_BYTES: Final = LENGTH * 36 << 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Nothing but the rounds, which are passes."""


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as name:
        folder = Path(name)
        progress.step("making a model of 205 million parameters")
        model = str(make_model(folder / "llama-205m"))
        rows = [await _measure(x, model, folder / x, args.rounds, progress) for x in VARIANTS]
    for row in rows:
        row["ratio"] = row["ttft_ms"] / rows[0]["ttft_ms"]
    return rows, []


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


async def _measure(
    variant: str, model: str, folder: Path, passes: int, progress: Progress
) -> dict[str, Any]:
    progress.step(f"starting {variant}")
    worker, times = _worker(variant, model, folder), []
    up = {"cores_per_worker": 1}
    async with serving(variant, folder, worker, up, policy="least_loaded") as served:
        for number in range((passes + 1) * PROMPTS):
            progress.step(f"{variant}, pass {number // PROMPTS} of {passes}")
            prompt = served.prompt(random.Random(number % PROMPTS), LENGTH)
            try:
                at_ms, _ = await served.ask(prompt, TOKENS)
            except TargetError as error:
                raise BenchError(str(error)) from None
            times.append(at_ms[0])
    first, again = median(times[:PROMPTS]), median(times[PROMPTS:])
    return {"variant": variant, "first pass, ms": first, "ttft_ms": again}
