"""A KV cache in GPU memory, and the copies between its blocks and contiguous staging memory.

vLLM 0.32 registers one view per layer, logically [blocks, heads, tokens, content]. `content` is K
and V of one head and token (or MLA's latent, with one head). The strides of the view express vLLM's
six physical layouts (vllm/v1/kv_cache_layout.py), and blocks that the attention kernel splits into
smaller ones. Staging memory holds [layer][block][head][token][content], so the two ends may have
different physical layouts.

The copies use torch's `index_select` and `index_copy_`: one launch if the layers are evenly spaced
in one allocation, as vLLM allocates them, else one launch per layer. Own kernels would save a few
launches, but were a second implementation that each release of Triton broke.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.host_memory import ROW_BYTES, KvRegion, SampledDigests, fold_digests
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.settings import DEVICE_COPIES, DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from kv_transfer.cache.cuda_runtime import CudaRuntime
    from kv_transfer.cache.host_memory import BlockCopy, StepEnd

# Lower numbers mean higher priority; torch clamps to the highest that the GPU supports.
_HIGHEST = -100
# Limit of threads that enqueue at once. Their work shares one stream, on which torch reuses the
# same staging memory, however much is in flight.
_copying = threading.BoundedSemaphore(DEVICE_COPIES)
_LANES = 2  # of a row
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class _BlockRuns(NamedTuple):
    """`blocks`: contiguous blocks as [blocks, rows, lanes]. `weights`: of the rows in the second
    sum of the digest (cache/host_memory.py)."""

    blocks: torch.Tensor
    weights: torch.Tensor

    def sums(self, block_ids: list[int]) -> torch.Tensor:
        """Enqueue the digest sums [2, blocks, lanes]. Peak memory is a copy of the blocks."""
        made = self.blocks.new_empty((2, len(block_ids), _LANES))
        rows = self.blocks.index_select(0, _table(block_ids, made.device))
        torch.sum(rows, 1, out=made[0])
        torch.sum(rows.mul_(self.weights), 1, out=made[1])
        return made


class DeviceRegion(KvRegion):
    """Blocks of a KV cache in GPU memory, restricted to `heads` if given.

    The geometry is in bytes; torch holds the addresses. `split` blocks of the views form one block
    of the engine.
    """

    is_host = False

    def __init__(
        self,
        views: Sequence[torch.Tensor],
        split: int = 1,
        heads: range | None = None,
        cuda: CudaRuntime | None = None,
    ) -> None:
        """`cuda`: lets the GPU's copy engines copy blocks to a region with the same block
        layout."""
        first = views[0]
        blocks, num_heads, tokens, content = first.shape
        self.views = tuple(views)
        self.split = split
        self.heads = range(num_heads) if heads is None else heads
        self._layers = _stacked([_as_words(view) for view in views])
        self._head_bytes = split * tokens * content * first.element_size()
        self._narrowed: dict[tuple[range, int, int], DeviceRegion] = {}
        self._cuda = cuda
        page = len(self.heads) * self._head_bytes
        count = blocks // split
        self.geometry = KvGeometry(len(views), count, page, count * page, page)

    def narrowed(self, layers: range, start: int, size: int) -> DeviceRegion:
        """Return some layers of the region, cut to `size` bytes from `start` of each page. Raises
        KvTransferError if the region lacks these layers, or the bytes are not whole heads."""
        if (len(layers), start, size) == (len(self.views), 0, self.geometry.page_bytes):
            return self
        if (found := self._narrowed.get((layers, start, size))) is not None:
            return found
        if not 0 <= layers.start < layers.stop <= len(self.views):
            raise KvTransferError(f"layers {layers.start} to {layers.stop} of {len(self.views)}")
        (first, rest), (count, more) = (divmod(n, self._head_bytes) for n in (start, size))
        if rest or more or not 0 < count <= len(self.heads) - first:
            raise KvTransferError(f"bytes {start}-{start + size} of a page are not whole heads")
        begin = self.heads.start + first
        views = self.views[layers.start : layers.stop]
        made = DeviceRegion(views, self.split, range(begin, begin + count))
        # Cached for the chunks, because building a region takes as long as enqueueing a copy.
        return self._narrowed.setdefault((layers, start, size), made)

    def enter_thread(self) -> None:
        """Select this GPU for the calling thread.

        A thread starts on GPU 0, and torch returns to GPU 0 when it leaves a stream of another GPU.
        In the process of rank 1 that would create a context on GPU 0, which takes hundreds of MB of
        memory that rank 0 needs.
        """
        device = self.views[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def step_end(self) -> StepEnd | None:
        device = self.views[0].device
        if device.type != "cuda":
            return None
        # `blocking=True`: a thread that waits for the event sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    @cached_property
    def block_layout(self) -> list[int] | None:
        """Shape and strides of a block. None if a block is not contiguous, or if the region has
        only some of the heads. Caches with equal layouts can exchange blocks without staging."""
        stack, num_heads = self._layers[0], self.views[0].shape[1]
        block = stack[:, 0]
        span = 1 + sum((n - 1) * s for n, s in zip(block.shape, block.stride(), strict=True))
        if len(self._layers) > 1 or not stack.stride(1) == span == block.numel():
            return None
        if len(self.heads) < num_heads:
            return None
        return [self.split, block.element_size(), *block.shape, *block.stride()]

    @cached_property
    def _runs(self) -> _BlockRuns | None:
        """The blocks as contiguous rows, or None if they are not contiguous whole rows."""
        stack = self._layers[0]
        content_bytes = stack.shape[-1] * stack.element_size()
        if self.block_layout is None or content_bytes % ROW_BYTES or stack.dtype != torch.int64:
            return None
        layers, _, heads, tokens, _ = stack.shape
        rows = content_bytes // ROW_BYTES
        count = layers * self.split * heads * tokens * rows
        shape = (self.geometry.num_blocks, count, _LANES)
        strides = (count * _LANES, _LANES, 1)
        weights = torch.arange(count, 0, -1, device=stack.device)
        logical = weights.view(layers, self.split, heads, tokens, rows)
        # In memory order: the kernel's blocks, then layers, heads and tokens by stride.
        inner = sorted((0, 2, 3), key=stack.stride().__getitem__, reverse=True)
        return _BlockRuns(
            torch.as_strided(stack, shape, strides), logical.permute(1, *inner, 4).reshape(-1, 1)
        )

    def pages_in_memory(self) -> tuple[int, KvGeometry] | None:
        stack = self._layers[0]
        _, _, heads, tokens, words = stack.shape
        is_run = stack.stride()[2:] == (tokens * words, words, 1)
        if len(self._layers) > 1 or self.split > 1 or not is_run:
            return None
        layer, block = (n * stack.element_size() for n in stack.stride()[:2])
        page = heads * self._head_bytes
        geometry = KvGeometry(len(self.views), stack.shape[1], page, layer, block)
        start = self.heads.start * self._head_bytes
        return stack.data_ptr(), geometry.narrowed(
            range(len(self.views)), start, self.geometry.page_bytes
        )

    def block_address(self, block: int) -> int:
        """Return the address of a contiguous block. Raises KvTransferError for an unknown id."""
        if not self.geometry.has_blocks([block]):
            raise KvTransferError("a block id is outside its KV cache")
        return self._layers[0].data_ptr() + block * self.geometry.block_bytes

    def gather(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """Enqueue a copy of the blocks into `staging` (bytes) on the current stream. The engine
        steps that fill the blocks must have ended (vllm/worker_half.py). Raises KvTransferError for
        an unknown block id."""
        for layers, part, table in self._copies(block_ids, staging):
            torch.index_select(layers, 1, table, out=part)

    def scatter(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """Enqueue a copy from `staging` into the blocks on the current stream.

        Need not wait for an engine step. vLLM frees blocks only after the steps in flight
        (`Scheduler.defer_block_free`), so no step still writes to a consumer's blocks. Nor does a
        draft model, which runs after its step: see vllm/worker_half.py.
        """
        for layers, part, table in self._copies(block_ids, staging):
            layers.index_copy_(1, table, part)

    def _copies(
        self, block_ids: Sequence[int], staging: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return (layers, their slice of staging, block table) for each launch."""
        if not self.geometry.has_blocks(block_ids):
            raise KvTransferError("a block id is outside its KV cache")
        if len(set(block_ids)) < len(block_ids):
            raise KvTransferError("a block is named twice")
        rows = [block * self.split + n for block in block_ids for n in range(self.split)]
        table = _table(rows, staging.device)
        size = len(block_ids) * self.geometry.block_bytes
        item = self._layers[0].element_size()
        words = staging[:size].view(self._layers[0].dtype)
        heads = slice(self.heads.start, self.heads.stop)
        copies, done = [], 0
        for stack in self._layers:
            layers = stack[:, :, heads]
            shape = (layers.shape[0], len(rows), *layers.shape[2:])
            count = shape[0] * (size // item // self.geometry.num_layers)
            copies.append((layers, words[done : done + count].view(shape), table))
            done += count
        return copies

    def pages(self, block_ids: Sequence[int]) -> list[memoryview]:
        raise KvTransferError("the KV cache is in GPU memory")

    def copy_from(self, source: KvRegion, source_ids: list[int], own_ids: list[int]) -> bytes:
        return self.begin_copy(source, source_ids, own_ids).wait()

    def begin_copy(
        self,
        source: KvRegion,
        source_ids: list[int],
        own_ids: list[int],
        checked: range | None = None,
    ) -> BlockCopy:
        """Enqueue a copy of blocks from a mapped peer's cache, and their digests.

        If both ends have the same block layout, the copy engines copy from block to block. The
        digests are then computed over the received blocks, on another stream, so that the next copy
        does not wait for them. Otherwise the blocks pass through staging memory.
        """
        if not isinstance(source, DeviceRegion) or len(source_ids) != len(own_ids):
            raise KvTransferError(f"cannot copy {len(source_ids)} blocks to {len(own_ids)} places")
        ours, theirs = self.geometry, source.geometry
        if (ours.num_layers, ours.page_bytes) != (theirs.num_layers, theirs.page_bytes):
            raise KvTransferError("the pages differ in number or size")
        if not (theirs.has_blocks(source_ids) and ours.has_blocks(own_ids)):
            raise KvTransferError("a block id is outside its KV cache")
        layout = None if source._cuda is None else source.block_layout
        with _copying, self.side_stream():
            try:
                if layout is not None and layout == self.block_layout:
                    self._copy_runs(source, source_ids, own_ids)
                    return self._begin_digests(own_ids, checked)
                staging = self._staging(len(own_ids))
                source.gather(source_ids, staging)
                sums = self._sums_of(staging)
                self.scatter(own_ids, staging)
                return _DeviceCopy(sums)
            except BaseException:
                self._finish()  # no copy may still write to the blocks
                raise

    def digests(self, block_ids: list[int]) -> bytes:
        """Return the digests of the blocks, as host_memory.py defines them."""
        return self.begin_digests(block_ids).wait()

    def begin_digests(self, block_ids: list[int], checked: range | None = None) -> BlockCopy:
        """Enqueue the computation of `digests`."""
        with _copying, self.side_stream():
            return self._begin_digests(block_ids, checked)

    def _begin_digests(self, block_ids: list[int], checked: range | None) -> BlockCopy:
        if checked is not None:
            some = self._begin_digests([block_ids[n] for n in checked], None)
            return SampledDigests(some, checked, len(block_ids))
        if not block_ids:  # it still ends after the copies
            none = torch.empty((2, 0, _LANES), dtype=torch.int64, device=self.views[0].device)
            return _DeviceCopy(none)
        step = max(1, DIGEST_BYTES // self.geometry.block_bytes)
        pieces = [block_ids[n : n + step] for n in range(0, len(block_ids), step)]
        sums = [self._sums(piece) for piece in pieces]
        return _DeviceCopy(torch.cat(sums, 1) if len(sums) > 1 else sums[0])

    def _sums(self, block_ids: list[int]) -> torch.Tensor:
        """Enqueue the digest sums [2, blocks, lanes]. The next call uses the same memory."""
        if self._runs is not None:
            if not self.geometry.has_blocks(block_ids):
                raise KvTransferError("a block id is outside its KV cache")
            return self._runs.sums(block_ids)
        staging = self._staging(len(block_ids))
        self.gather(block_ids, staging)
        return self._sums_of(staging)

    def _copy_runs(self, source: DeviceRegion, source_ids: list[int], own_ids: list[int]) -> None:
        """Enqueue copies from block to block. The current stream waits for them."""
        assert source._cuda is not None, "the caller has seen it"
        size = self.geometry.block_bytes
        to, read = (
            region._layers[0].data_ptr() + np.array(ids, np.uint64) * np.uint64(size)
            for region, ids in ((self, own_ids), (source, source_ids))
        )
        device = self.views[0].device
        if device.type != "cuda":
            source._cuda.copy(to, read, size, 0)
            return
        copies = _copy_engines(device)
        source._cuda.copy(to, read, size, copies.cuda_stream)
        torch.cuda.current_stream(device).wait_stream(copies)

    def _finish(self) -> None:
        """Wait until every enqueued copy and digest has run."""
        device = self.views[0].device
        if device.type == "cuda":
            for stream in (_copy_engines(device), _side_stream(device)):
                stream.synchronize()

    def _staging(self, blocks: int) -> torch.Tensor:
        device = self.views[0].device
        return torch.empty(self.size_bytes(blocks), dtype=torch.uint8, device=device)

    def _sums_of(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the digest sums [2, blocks, lanes], computed by plain torch operations.

        Torch's integers wrap like numpy's in host_memory.py. Peak memory is `staging` plus one
        product of the same size.
        """
        pages = staging.view(self.geometry.num_layers, -1, self.geometry.page_bytes)
        if rest := -pages.shape[2] % ROW_BYTES:
            pages = torch.nn.functional.pad(pages, (0, rest))
        rows = pages.view(torch.int64).view(*pages.shape[:2], -1, ROW_BYTES // 8)
        layers, _, each, _ = rows.shape
        weights = torch.arange(layers * each, 0, -1, device=rows.device).view(layers, 1, each, 1)
        return torch.stack([rows.sum((0, 2)), (rows * weights).sum((0, 2))])

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context in which copies run on a stream other than the engine's."""
        device = self.views[0].device
        if device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(_side_stream(device))


def _table(rows: list[int], device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.tensor(rows)
    # The copy from pinned memory does not block the calling thread.
    return torch.tensor(rows, pin_memory=True).to(device, non_blocking=True)


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream with the highest priority. Copies are short; at the engine's priority they
    would queue behind kernels that fill the GPU."""
    return torch.cuda.Stream(device, priority=_HIGHEST)  # type: ignore[no-untyped-call]


_side_stream, _copy_engines = cache(copy_stream), cache(copy_stream)


class _DeviceCopy:
    """Digests of blocks in transfer from the current stream to the host."""

    def __init__(self, sums: torch.Tensor) -> None:
        """`sums`: [2, blocks, lanes], in GPU memory."""
        self._event = None
        if sums.device.type != "cuda":
            self._sums = sums
            return
        self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._sums.copy_(sums, non_blocking=True)
        # `blocking=True`: a thread that waits for the event sleeps instead of spinning.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(sums.device))

    @property
    def has_ended(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> bytes:
        if self._event is not None:
            self._event.synchronize()
        if not self._sums.shape[1]:
            return b""
        return fold_digests(*self._sums.numpy().view(np.uint64))


def _as_words(view: torch.Tensor) -> torch.Tensor:
    """Return the view as the widest integers that its strides allow, to copy fewer elements."""
    for dtype in _WORDS:
        try:
            return view.view(dtype)
        except RuntimeError:
            continue
    raise UnsupportedLayout(f"a KV cache of {view.dtype} with strides {view.stride()}")


def device_regions(regions: Mapping[int, KvRegion]) -> dict[int, DeviceRegion]:
    """Return the regions in GPU memory, which are all or none."""
    return {n: region for n, region in regions.items() if isinstance(region, DeviceRegion)}


def _stacked(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor [layers, blocks, heads, tokens, words] if the layers are evenly spaced in
    one allocation, else one tensor per layer with a leading dimension of one."""
    first = views[0]
    starts = [view.storage_offset() for view in views]
    step = starts[1] - starts[0] if len(views) > 1 else 0
    is_one = len({view.untyped_storage().data_ptr() for view in views}) == 1
    if is_one and step >= 0 and starts == [starts[0] + n * step for n in range(len(views))]:
        shape, strides = (len(views), *first.shape), (step, *first.stride())
        return [torch.as_strided(first, shape, strides)]
    return [view[None] for view in views]


def device_region(caches: Sequence[torch.Tensor], num_blocks: int) -> DeviceRegion:
    """Return the region of the KV cache that vLLM registered. `num_blocks` is the block count of
    vLLM's scheduler. Raises UnsupportedLayout."""
    first = caches[0]
    if any(
        (cache.shape, cache.dtype, cache.stride()) != (first.shape, first.dtype, first.stride())
        for cache in caches
    ):
        raise UnsupportedLayout("the layers' KV caches differ in shape, dtype or strides")
    if first.dim() != 4 or first.stride(3) != 1:
        raise UnsupportedLayout(f"a layer's KV cache has the shape {tuple(first.shape)}")
    split, rest = divmod(first.shape[0], num_blocks)
    if rest or not split:
        raise UnsupportedLayout(f"{first.shape[0]} blocks where the scheduler has {num_blocks}")
    return DeviceRegion(caches, split)
