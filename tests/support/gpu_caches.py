"""KV caches in GPU memory for the GPU tests, and the check that a GPU is available."""

from __future__ import annotations

import sys

import torch

from kv_transfer.cache.gpu_memory import DeviceRegion, device_region

# vLLM's names of physical layouts, which give the order of dimensions in memory.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYERS, BLOCKS, HEADS, TOKENS = 4, 64, 8, 16


def missing_gpu() -> str:
    """Return the reason why no GPU test can run here, or ""."""
    return "" if torch.cuda.is_available() else "torch finds no CUDA GPU"


def is_shim() -> bool:
    """Return True if tests/gpu/shim stands in for CUDA."""
    return "tests.gpu.shim.preload" in sys.modules


def random_cache(seed: int, *, layers: int = LAYERS, width: int = 256) -> torch.Tensor:
    """Return random bits as [layers, blocks, heads, tokens, content], in host memory."""
    dice = torch.Generator().manual_seed(seed)
    shape = (layers, BLOCKS, HEADS, TOKENS, width)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=dice)


def on_gpu(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, DeviceRegion]:
    """Return a view of the same shape on the GPU, physically in `layout`, and its region."""
    physical = values.permute(["LBHNC".index(name) for name in layout]).contiguous().cuda()
    view = physical.permute([layout.index(name) for name in "LBHNC"])
    return view, device_region(list(view), BLOCKS)
