"""The GPU benchmark on a machine without one: what it says, and its links over devices in host
memory. How fast they were is nobody's business here."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.errors import BenchError
from benchmarks.gpu import links
from benchmarks.gpu.__main__ import main, print_links
from benchmarks.kv_transfer import ours
from benchmarks.kv_transfer.pair import Ends
from tests.unit.kv_transfer.fake_device import ipc_transport

if TYPE_CHECKING:
    from benchmarks.gpu.links import GpuCache
    from benchmarks.kv_transfer.ends import WayEnd
    from kv_transfer.layout import KvGeometry

CACHE_BYTES = 32 << 20


def test_without_a_gpu_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu: torch finds no CUDA GPU on this machine\n"
    with pytest.raises(BenchError, match="torch finds no CUDA GPU"):
        links.measure_here(0)


# In the processes that measure:


def fake_end(way: str, role: str, cache: GpuCache, layout: KvGeometry) -> WayEnd:
    made: Any = ours
    made.make = lambda settings: [ipc_transport(slot_bytes=links.BLOCK_BYTES)]
    return links.make_end(way, role, cache, layout)


def fake_cache(role: str) -> GpuCache:
    return links.GpuCache(CACHE_BYTES, "cpu")


def test_links_move_blocks_that_arrive_as_they_were_and_have_their_rates() -> None:
    ends = Ends(fake_end, fake_cache)
    rows = list(links.measure(ends, ["cuda_ipc"], [1, 3], cache_bytes=CACHE_BYTES, rounds=1))
    assert [(row.way, row.blocks, row.mib) for row in rows] == [
        ("copy", 1, 2.0),
        ("cuda_ipc", 1, 2.0),
        ("copy", 3, 6.0),
        ("cuda_ipc", 3, 6.0),
    ]
    assert all(row.gb_s > 0 and row.ratio > 0 for row in rows)
    out = io.StringIO()
    print_links(out, rows, links.left_out(1))
    *lines, last = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["copy", "cuda_ipc"] * 2
    assert last == "nccl: needs two GPUs, for NCCL takes a GPU once; this machine has 1"
    assert links.left_out(2) == {}
