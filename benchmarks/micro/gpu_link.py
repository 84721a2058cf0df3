"""Predicted utilization of a link between two GPUs, computed from this CPU's cost of a chunk. No
GPU is used. The host's work per chunk is measured with the code that drives GPUs, over a small KV
cache in host memory and a CUDA runtime that does nothing. "staging": the caches have different
block layouts, and the reader thread waits for each chunk. "runs": equal layouts; the copy engines
copy from block to block, and several chunks are in flight. "undigested": as "runs", for a chunk
without digests, which most chunks are if `worker.kv.digest_one_in` exceeds the blocks of a chunk.

"nccl": sends of `SEND_CHUNKS` chunks, `WINDOW` of them offered; "nccl in turn": one chunk, one
offer. Nothing of these is measured.

Assumptions: a call of CUDA's runtime costs the host 4 us, kernels start in 2.5 us, GPU memory moves
2.5 TB/s, and waking a thread costs 30 us. NCCL: offer, answer and enqueueing take 420 us, each
block 7 us more, and a thread block moves 22 GB/s. The slowest of host, link and GPU memory limits
the throughput; with staging, their times add up.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.stats import alternate, compare
from kv_transfer.cache.cuda_runtime import CudaRuntime
from kv_transfer.cache.gpu_memory import DeviceRegion
from kv_transfer.cache.host_memory import checked_blocks
from kv_transfer.settings import SEND_CHUNKS, WINDOW

if TYPE_CHECKING:
    import argparse

    from benchmarks.progress import Progress

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 4, 64, 2, 4, 16
REPEATS: Final = 300  # of which a round is the median
CALL_S, LAUNCH_S, WAKE_S, MEMORY_BYTES_PER_S = 4e-6, 2.5e-6, 30e-6, 2.5e12
HANDSHAKE_S, POST_S, CTAS, CTA_GB_PER_S = 420e-6, 7e-6, 4, 22.0
DIGEST_PASSES = 6


class _Way(NamedTuple):
    """`calls` of CUDA's runtime and GPU operations (`launches`) per chunk. `passes`: reads and
    writes of the consumer's GPU memory per byte, digests included (cache/gpu_memory.py)."""

    calls: int
    launches: int
    passes: int
    waits: bool


WAYS: Final = {
    "staging": _Way(20, 10, 1 + DIGEST_PASSES, waits=True),
    "runs": _Way(17, 7, 1 + DIGEST_PASSES, waits=False),
    "undigested": _Way(6, 2, 1, waits=False),
}


class _NcclWay(NamedTuple):
    """`chunks` in a send, and offers without an answer (`window`)."""

    chunks: int
    window: int


NCCL_WAYS: Final = {"nccl in turn": _NcclWay(1, 1), "nccl": _NcclWay(SEND_CHUNKS, WINDOW)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--links", default="450,300,50", metavar="GB/S,...", help="speeds of links")
    parser.add_argument("--chunk-mib", type=int, default=16, help="size of a chunk (16)")
    parser.add_argument("--blocks", type=int, default=12, help="in a chunk (12)")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes."""
    torch.set_num_threads(1)  # small operations take longer on several threads
    own = DeviceRegion(_views())
    sources = {
        "staging": DeviceRegion(_views()),
        "runs": DeviceRegion(_views(), cuda=CudaRuntime(_Nothing())),
    }
    sources["undigested"] = sources["runs"]
    read, written = list(range(args.blocks)), list(range(BLOCKS - args.blocks, BLOCKS))

    checked = {"undigested": checked_blocks(1, args.blocks, args.blocks + 1)}

    async def measure(way: str, number: int) -> float:
        progress.step(f"round {number}, {way}")
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            own.begin_copy(sources[way], read, written, checked.get(way)).wait()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    seconds = [x async for x in alternate(list(WAYS), args.rounds, measure)]
    rows = []
    size = args.chunk_mib << 20
    for name, (host_s, ratio) in compare(seconds, "staging").items():
        for link in map(float, args.links.split(",")):
            speed = computed_gb_per_s(WAYS[name], host_s, size, link)
            rows.append(
                {
                    "way": name,
                    "host_us_a_chunk": host_s * 1e6,
                    "host_ratio_to_staging": ratio or 1.0,
                    "link_gb_per_s": link,
                    "computed_gb_per_s": speed,
                    "computed_share": speed / link,
                }
            )
    rows += [
        nccl_row(name, size, args.blocks, link)
        for name in NCCL_WAYS
        for link in map(float, args.links.split(","))
    ]
    notes = "computed, not measured on a GPU; only the host's time without CUDA is measured"
    return rows, [notes, "nccl: all computed"]


def computed_gb_per_s(way: _Way, host_s: float, size: int, link_gb_per_s: float) -> float:
    """Return the speed of chunks of `size` bytes over a link, under this module's assumptions."""
    link_s = size / (link_gb_per_s * 1e9)
    memory_s = way.passes * size / MEMORY_BYTES_PER_S + way.launches * LAUNCH_S
    host_s += way.calls * CALL_S
    taken = host_s + WAKE_S + link_s + memory_s if way.waits else max(host_s, link_s, memory_s)
    return size / taken / 1e9


def nccl_row(name: str, size: int, blocks: int, link_gb_per_s: float) -> dict[str, Any]:
    """Return the row of a way of NCCL, for chunks of `size` bytes in `blocks` blocks."""
    way = NCCL_WAYS[name]
    sent = size * way.chunks
    post_s = blocks * way.chunks * POST_S
    link_s = sent / (min(link_gb_per_s, CTAS * CTA_GB_PER_S) * 1e9)
    memory_s = DIGEST_PASSES * sent / MEMORY_BYTES_PER_S
    speed = sent / max((HANDSHAKE_S + post_s) / way.window, post_s, link_s, memory_s) / 1e9
    return {
        "way": name,
        "host_us_a_chunk": post_s / way.chunks * 1e6,
        "link_gb_per_s": link_gb_per_s,
        "computed_gb_per_s": speed,
        "computed_share": speed / link_gb_per_s,
    }


def _views() -> list[torch.Tensor]:
    """Return a cache with contiguous blocks, so small that copies take no time."""
    return list(
        torch.zeros((BLOCKS, LAYERS, HEADS, TOKENS, CONTENT), dtype=torch.int16).transpose(0, 1)
    )


class _LibraryFunction:
    """A function of a library that returns at once."""

    def __call__(self, *_: object) -> int:
        return 0


class _Nothing:
    """A CUDA runtime of version 13 that does nothing."""

    def __getattr__(self, name: str) -> _LibraryFunction:
        return _LibraryFunction()

    @staticmethod
    def cudaRuntimeGetVersion(out: Any) -> int:  # noqa: N802 - CUDA's name
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = 13000
        return 0
