"""KV caches in GPU memory, and the load of an engine beside them."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

import torch

from benchmarks.errors import BenchError
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.protocol.transport import LocalKv

# A rank's part of a block of Llama-3-70B on four GPUs: 16 KiB for each of 80 layers.
HEADS, TOKENS, CONTENT = 2, 16, 256
LAYER_BYTES: Final = HEADS * TOKENS * CONTENT * 2
LAYOUT: Final = "BLHNC"
_STEP_PRODUCTS = 30  # matrix products of 1.1 TFLOP each: about 50 ms on a large GPU


def missing_gpu() -> str:
    """Return why nothing can be measured on a GPU here, or ""."""
    return "" if torch.cuda.is_available() else "torch finds no CUDA GPU"


class GpuCache:
    """A cache of `blocks` blocks on the GPU `device`. `layout`: vLLM's name of the order of
    dimensions. If `is_counted`, each word of its memory holds its index, else -1. Raises BenchError
    if blocks of `block_bytes` are not whole layers.
    """

    def __init__(
        self, blocks: int, block_bytes: int, layout: str, device: int, *, is_counted: bool
    ) -> None:
        layers, rest = divmod(block_bytes, LAYER_BYTES)
        if rest or not layers:
            raise BenchError(f"blocks on a GPU are multiples of {LAYER_BYTES >> 10} KiB")
        sizes = {"L": layers, "B": blocks, "H": HEADS, "N": TOKENS, "C": CONTENT}
        self._shape = [sizes[name] for name in layout]
        self._order = [layout.index(name) for name in "LBHNC"]
        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        self._view = self._logical(self._numbers(is_counted=is_counted).to(self._device))
        self.region = device_region(list(self._view), blocks)
        self.local = LocalKv({0: self.region}, None)

    def _numbers(self, *, is_counted: bool) -> torch.Tensor:
        words = torch.Size(self._shape).numel() // 4
        made = torch.arange(words) if is_counted else torch.full((words,), -1)
        return made.view(torch.int16).view(self._shape)

    def _logical(self, physical: torch.Tensor) -> torch.Tensor:
        """Return [layers, blocks, heads, tokens, content]."""
        return physical.permute(self._order)

    def wrong_blocks(self, source_ids: list[int], own_ids: list[int]) -> int:
        """Return the number of our blocks that differ from the source blocks of a counted cache."""
        wanted = self._logical(self._numbers(is_counted=True))[:, source_ids]
        return int((self._view.cpu()[:, own_ids] != wanted).any(4).any(3).any(2).any(0).sum())

    def memcpy(self, size: int, device: int) -> float:
        """Return the seconds of one copy of `size` bytes from the GPU `device` to this one."""
        source = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
        target = torch.empty(size, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        return time.perf_counter() - begun


class BusyEngine:
    """Keeps a step running on the calling thread's GPU and another one enqueued, as asynchronous
    scheduling does, until `close`. Raises BenchError if the GPU runs no kernels."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        device = torch.cuda.current_device()
        try:
            # The first product also loads the library.
            matrix = torch.ones((8192, 8192), device="cuda", dtype=torch.bfloat16)
            torch.mm(matrix, matrix)
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise BenchError(f"no engine can keep this GPU busy: {error}") from error
        self._thread = threading.Thread(target=self._run, args=(device, matrix), daemon=True)
        self._thread.start()

    def _run(self, device: int, matrix: torch.Tensor) -> None:
        torch.cuda.set_device(device)
        ends = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        while not self._closing.is_set():
            for end in ends:
                end.synchronize()
                for _ in range(_STEP_PRODUCTS):
                    torch.mm(matrix, matrix)
                end.record()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(60)
        torch.cuda.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
