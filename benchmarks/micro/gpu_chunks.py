"""What a chunk of a `cuda_ipc` transfer costs the host and the GPU, by size of blocks and chunks.

The consumer's own code copies between blocks of one GPU, with `IN_FLIGHT` chunks in flight as in a
transfer. "engines": equal layouts, so the copy engines copy from block to block. "staging": other
layouts, gathered and scattered by kernels. `host_us` is the time of the thread that enqueues a
chunk. A link is never faster than the GPU's own memory, so `gb_per_s` bounds every link.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.errors import BenchError
from benchmarks.micro.gpu_cache import LAYER_BYTES, LAYOUT, GpuCache, missing_gpu
from benchmarks.stats import alternate
from kv_transfer.cache import cuda_runtime
from kv_transfer.cache.gpu_memory import DeviceRegion
from kv_transfer.cache.host_memory import checked_blocks

if TYPE_CHECKING:
    import argparse

    from benchmarks.progress import Progress
    from kv_transfer.cache.host_memory import BlockCopy

IN_FLIGHT: Final = 4
ENGINES, STAGING = "engines", "staging"
ALL, NONE = "all", "none"
# Staging needs the sums of what it gathers, so it always computes them.
WAYS: Final = ((ENGINES, ALL), (ENGINES, NONE), (STAGING, ALL))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-kib", default="64,256,1280", metavar="N,...", help="size of a block"
    )
    parser.add_argument("--chunk-mib", default="16,64", metavar="N,...", help="of a chunk (16,64)")
    parser.add_argument("--chunks", type=int, default=60, help="a round (60)")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    if reason := missing_gpu():
        raise BenchError(reason)
    rows: list[dict[str, Any]] = []
    for block_bytes in (int(x) << 10 for x in args.block_kib.split(",")):
        if block_bytes < LAYER_BYTES:
            raise BenchError(f"--block-kib: at least {LAYER_BYTES >> 10}")
        for chunk_bytes in (int(x) << 20 for x in args.chunk_mib.split(",")):
            progress.step(f"blocks of {block_bytes >> 10} KiB, chunks of {chunk_bytes >> 20} MiB")
            rows += await _rows(block_bytes, max(1, chunk_bytes // block_bytes), args)
            torch.cuda.empty_cache()
    return rows, [f"{torch.cuda.get_device_name()}, {IN_FLIGHT} chunks in flight"]


async def _rows(block_bytes: int, blocks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    cache = GpuCache(2 * blocks, block_bytes, LAYOUT, 0, is_counted=True)
    own = cache.region
    sources = {
        ENGINES: DeviceRegion(own.views, own.split, cuda=cuda_runtime.load()),
        STAGING: DeviceRegion(own.views, own.split),
    }
    ids = random.Random(0).sample(range(2 * blocks), 2 * blocks)
    read, written = ids[:blocks], ids[blocks:]
    checked = {ALL: None, NONE: checked_blocks(1, blocks, blocks + 1)}
    host: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}

    chunks: int = args.chunks

    async def measure(name: str, number: int) -> float:
        """Return the seconds of a chunk."""
        way = WAYS[int(name)]
        flying: deque[BlockCopy] = deque()
        begun = time.perf_counter()
        for _ in range(chunks):
            enqueued = time.perf_counter()
            flying.append(own.begin_copy(sources[way[0]], read, written, checked[way[1]]))
            host[way].append(time.perf_counter() - enqueued)
            if len(flying) > IN_FLIGHT:
                flying.popleft().wait()
        while flying:
            flying.popleft().wait()
        return (time.perf_counter() - begun) / chunks

    names = [str(n) for n in range(len(WAYS))]
    rounds = [x async for x in alternate(names, args.rounds, measure)]
    size = blocks * block_bytes
    return [
        {
            "way": way[0],
            "digests": way[1],
            "block_kib": block_bytes >> 10,
            "chunk_mib": size / 2**20,
            "host_us": 1e6 * statistics.median(host[way]),
            "gb_per_s": size / statistics.median(x[name] for x in rounds) / 1e9,
        }
        for name, way in zip(names, WAYS, strict=True)
    ]
