"""KV blocks between the caches of two processes in GPU memory, over `cuda_ipc` and `nccl`, against
the card's own copy of as many bytes in one piece. With one GPU both processes use it, and the
figures are of its memory; with two each has its own, and they are of what joins them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchError
from benchmarks.kv_transfer.cases import Case
from benchmarks.kv_transfer.ours import OurSource, OurTarget
from benchmarks.kv_transfer.pair import Ends, Measured, Pair, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from benchmarks.kv_transfer.cases import Trip
    from benchmarks.kv_transfer.ends import WayEnd
    from kv_transfer.device.region import DeviceRegion
    from kv_transfer.layout import KvGeometry

LAYERS, HEADS, TOKENS = 32, 8, 16
# A block of an 8B model's KV over all layers: 16 tokens.
BLOCK_BYTES = 2 << 20
COUNTS = (1, 16, 128)
CACHE_BYTES = 1 << 30
COPY, WAYS = "copy", ("cuda_ipc", "cuda_ipc digest", "nccl")
ITEM = 8


class GpuCache:
    """A KV cache in the memory of one device, as words."""

    shared = None

    def __init__(self, size: int, device: str) -> None:
        import torch

        if device.startswith("cuda"):
            torch.cuda.set_device(torch.device(device))
        self.words = torch.zeros(size // ITEM, dtype=torch.int64, device=device)

    def region(self, geometry: KvGeometry) -> DeviceRegion:
        from kv_transfer.device.region import device_region

        return device_region(list(self._blocks(geometry)), geometry.num_blocks)

    def number_words(self) -> None:
        import torch

        torch.arange(self.words.numel(), out=self.words)

    def clear(self) -> None:
        self.words.fill_(-1)

    def differing_blocks(self, geometry: KvGeometry, trip: Trip) -> int:
        import torch

        pages = self._blocks(geometry).flatten(2)[:, trip.target_ids].cpu()
        words = geometry.page_bytes // ITEM
        inside = torch.arange(words)
        wrong = 0
        for n, source_id in enumerate(trip.source_ids):
            starts = [geometry.page_offset(i, source_id) // ITEM for i in range(LAYERS)]
            wrong += not torch.equal(pages[:, n], torch.tensor(starts)[:, None] + inside)
        return wrong

    def _blocks(self, geometry: KvGeometry) -> torch.Tensor:
        """[layers, blocks, heads, tokens, content]."""
        content = geometry.page_bytes // (HEADS * TOKENS * ITEM)
        shape = (geometry.num_layers, geometry.num_blocks, HEADS, TOKENS, content)
        size = geometry.num_layers * geometry.num_blocks * geometry.page_bytes // ITEM
        return self.words[:size].view(shape)


class CopyEnd:
    """The target's process copies one run of bytes from the source's device to its own."""

    def __init__(self, role: str, cache: GpuCache) -> None:
        self._role = role
        self._cache = cache
        self._from: torch.Tensor | None = None

    def facts(self) -> Any:
        return str(self._cache.words.device)

    def connect(self, facts: Any) -> None:
        if self._role == "target":
            import torch

            self._from = torch.zeros_like(self._cache.words, device=facts)

    def arm(self, trip: Trip) -> None:
        pass

    def go(self, trip: Trip) -> float | None:
        if self._from is None:
            return None
        import torch

        size = len(trip.source_ids) * BLOCK_BYTES // ITEM
        begun = time.perf_counter()
        self._cache.words[:size].copy_(self._from[:size])
        if self._cache.words.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def close(self) -> None:
        self._from = None


def make_end(way: str, role: str, cache: GpuCache, layout: KvGeometry) -> WayEnd:
    """One end of a way, in the process that it is for."""
    if way == COPY:
        return CopyEnd(role, cache)
    return (OurSource if role == "source" else OurTarget)(way, cache, layout)


def gpu_cache(num_gpus: int, role: str) -> GpuCache:
    """On a GPU of the role's own, where there are two."""
    index = 1 if role == "target" and num_gpus > 1 else 0
    return GpuCache(CACHE_BYTES, f"cuda:{index}")


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One way in one case, in the median round."""

    way: str
    blocks: int
    mib: float
    gb_s: float
    ratio: float


def left_out(num_gpus: int) -> dict[str, str]:
    """The ways that cannot be measured with so many GPUs, and why."""
    if num_gpus > 1:
        return {}
    return {"nccl": f"needs two GPUs, for NCCL takes a GPU once; this machine has {num_gpus}"}


def measure(
    ends: Ends, ways: Sequence[str], counts: Sequence[int], *, cache_bytes: int, rounds: int
) -> Iterator[LinkRow]:
    """Raises BenchError, also where blocks do not arrive as they were."""
    cases = [Case(count, BLOCK_BYTES) for count in counts]
    with Pair(cache_bytes, LAYERS, ends) as pair:
        for row in pair.measure(cases, (COPY, *ways), rounds):
            ceiling = row[0]
            yield from (_row(way, ceiling) for way in row)


def _row(way: Measured, ceiling: Measured) -> LinkRow:
    case = way.case
    return LinkRow(way.way, case.count, case.bytes / 2**20, way.gb_per_s, ratio(way, ceiling))


def measure_here(num_gpus: int, rounds: int = 5) -> list[LinkRow]:
    """All ways that this machine has the GPUs for. Raises BenchError."""
    ways = [way for way in WAYS if way not in left_out(num_gpus)]
    if not num_gpus:
        raise BenchError("torch finds no CUDA GPU on this machine")
    ends = Ends(make_end, partial(gpu_cache, num_gpus))
    return list(measure(ends, ways, COUNTS, cache_bytes=CACHE_BYTES, rounds=rounds))
