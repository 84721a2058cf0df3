"""`python -m benchmarks.gpu [--json FILE]`: gather and scatter against the card's own copy, and KV
between two processes over `cuda_ipc` and `nccl` (links.py), as tables and JSON. With one GPU all
figures are of its memory, not of any link."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.errors import BenchError
from benchmarks.gpu import links

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Layers, heads and content of an 8B model's KV: 16-token blocks of 64 KiB a layer.
LAYERS, HEADS, TOKENS, CONTENT, ITEM = 32, 8, 16, 256, 2
CASES = (1, 4, 16)
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One number of blocks: GB/s of payload, and the ratio to a plain copy of as many bytes."""

    blocks: int
    mib: float
    copy_gb_s: float
    gather_gb_s: float
    scatter_gb_s: float
    gather_ratio: float
    scatter_ratio: float


def _gb_s(work: Callable[[], object], size_bytes: int) -> float:
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(ROUNDS):
        begun, ended = event(), event()
        begun.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return size_bytes / sorted(times)[len(times) // 2] / 1e9


def measure(blocks: int) -> Row:
    """One row, on the current device."""
    import torch

    from kv_transfer.device.cuda import kernels
    from kv_transfer.device.region import device_region

    shape = (LAYERS, 4 * blocks, TOKENS, HEADS, CONTENT)
    cache = torch.zeros(shape, dtype=torch.float16, device="cuda")
    region = device_region(list(cache.transpose(2, 3)), 4 * blocks)
    size = blocks * region.geometry.block_bytes
    staging = torch.zeros(size, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(staging)
    piece, table = region.piece(list(range(0, 4 * blocks, 4)))
    how = kernels()
    copy = _gb_s(lambda: other.copy_(staging), size)
    gather = _gb_s(lambda: how.gather(region.cache, piece, table, staging), size)
    scatter = _gb_s(lambda: how.scatter(region.cache, piece, table, staging), size)
    return Row(blocks, size / 2**20, copy, gather, scatter, gather / copy, scatter / copy)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    asked = parser.parse_args(arguments)
    out = sys.stdout
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("benchmarks.gpu: torch finds no CUDA GPU on this machine\n")
        return 2
    gpus = torch.cuda.device_count()
    rows = [measure(blocks) for blocks in CASES]
    _print_rows(out, rows)
    gone = links.left_out(gpus)
    try:
        moved = links.measure_here(gpus)
    except BenchError as error:
        sys.stderr.write(f"benchmarks.gpu: {error}\n")
        return 2
    print_links(out, moved, gone)
    figures = {
        "card": torch.cuda.get_device_name(),
        "gpus": gpus,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
        "links": [asdict(row) for row in moved],
        "left_out": gone,
    }
    text = json.dumps(figures, indent=2)
    if asked.json is None:
        out.write(text + "\n")
    else:
        asked.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _print_rows(out: TextIO, rows: Sequence[Row]) -> None:
    out.write("blocks      MiB     copy   gather  scatter  gather/copy  scatter/copy\n")
    out.writelines(
        f"{row.blocks:6d} {row.mib:8.1f} {row.copy_gb_s:8.1f} {row.gather_gb_s:8.1f} "
        f"{row.scatter_gb_s:8.1f} {row.gather_ratio:12.2f} {row.scatter_ratio:13.2f}\n"
        for row in rows
    )


def print_links(out: TextIO, rows: Sequence[links.LinkRow], gone: dict[str, str]) -> None:
    """The ways between two processes, and those that were left out."""
    out.write("blocks      MiB             way     GB/s  way/copy\n")
    out.writelines(
        f"{row.blocks:6d} {row.mib:8.1f} {row.way:>15} {row.gb_s:8.1f} {row.ratio:9.2f}\n"
        for row in rows
    )
    out.writelines(f"{way}: {reason}\n" for way, reason in gone.items())


if __name__ == "__main__":
    sys.exit(main())
