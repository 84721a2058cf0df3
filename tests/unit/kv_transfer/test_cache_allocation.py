"""The KV cache of an engine on a CPU takes memory only where a block was written."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kv_transfer.cache.host_memory import SharedMemory
from kv_transfer.vllm.kv_layout import allocate_in, allocate_untouched

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SIZE, LITTLE = 256 << 20, 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_cache_is_zero_and_takes_memory_as_it_fills(*, is_shared: bool) -> None:
    with closing(SharedMemory("test")) as shared:
        context: AbstractContextManager[Any] = (
            allocate_in(shared) if is_shared else allocate_untouched()
        )
        before = resident_bytes()
        with context:
            cache = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
            other = torch.zeros(8, dtype=torch.int8)
        assert resident_bytes() - before < LITTLE
        assert shared.size == (SIZE if is_shared else 0)
        cache[-1] = 5
        assert (int(cache[0]), int(cache[-1]), int(other.sum())) == (0, 5, 0)
