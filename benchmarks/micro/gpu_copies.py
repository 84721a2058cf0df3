"""Speed of the copies and digests that need kernels, on one GPU, idle and beside a busy engine.

GB/s of payload; a copy within the GPU reads and writes each byte. "copy" is torch's copy of the
same number of bytes. Transfers gather and scatter between caches with different block layouts, and
over NCCL with small blocks. Every transfer has digests.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.errors import BenchError
from benchmarks.micro.gpu_cache import LAYER_BYTES, LAYOUT, BusyEngine, GpuCache, missing_gpu
from benchmarks.stats import alternate, compare
from kv_transfer.cache.gpu_memory import copy_stream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.progress import Progress

LAYERS: Final = 32
REPEATS: Final = 20  # per round, which reports the median
SETTLE_S: Final = 1.0  # until the engine's steps run back to back


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", default=f"LBNHC,{LAYOUT}", metavar="NAME,...", help="vLLM's")
    parser.add_argument("--blocks", type=int, default=64, help=f"of {LAYERS} layers (64)")
    parser.add_argument("--busy", action="store_true", help="beside a busy engine")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    if reason := missing_gpu():
        raise BenchError(reason)
    rows: list[dict[str, Any]] = []
    for layout in args.layouts.split(","):
        cache = GpuCache(args.blocks, LAYERS * LAYER_BYTES, layout, 0, is_counted=True)
        with BusyEngine() if args.busy else nullcontext():
            await asyncio.sleep(SETTLE_S if args.busy else 0.0)
            progress.step(layout)
            rates = await _rates(cache, args.blocks, args.rounds)
        rows += [
            {
                "layout": layout,
                "engine": "busy" if args.busy else "idle",
                "gb_per_s": rate,
                "of": of,
            }
            for of, (rate, _) in compare(rates, "copy").items()
        ]
    return rows, [
        f"{torch.cuda.get_device_name()}, {args.blocks} blocks of {LAYERS} layers at a time"
    ]


async def _rates(cache: GpuCache, blocks: int, rounds: int) -> list[dict[str, float]]:
    region, ids = cache.region, list(range(blocks))
    size = region.size_bytes(blocks)
    staging, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(staging),
        "gather": lambda: region.gather(ids, staging),
        "scatter": lambda: region.scatter(ids, staging),
        "digests": lambda: region.digests(ids),
    }

    async def measure(name: str, number: int) -> float:
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            works[name]()
            torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - begun)
        return size / sorted(times)[REPEATS // 2] / 1e9

    with torch.cuda.stream(copy_stream(staging.device)):
        return [x async for x in alternate(list(works), rounds, measure)]
