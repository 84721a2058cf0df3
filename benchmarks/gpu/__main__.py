"""`python -m benchmarks.gpu [--json FILE]`: gather and scatter against the card's own copy, in one
run, as a table and JSON. One GPU; its figures are of its memory, not of any link."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
    rows = [measure(blocks) for blocks in CASES]
    out.write("blocks      MiB     copy   gather  scatter  gather/copy  scatter/copy\n")
    for row in rows:
        out.write(
            f"{row.blocks:6d} {row.mib:8.1f} {row.copy_gb_s:8.1f} {row.gather_gb_s:8.1f} "
            f"{row.scatter_gb_s:8.1f} {row.gather_ratio:12.2f} {row.scatter_ratio:13.2f}\n"
        )
    card, figures = torch.cuda.get_device_name(), [asdict(row) for row in rows]
    text = json.dumps({"card": card, "torch": torch.__version__, "rows": figures}, indent=2)
    if asked.json is None:
        out.write(text + "\n")
    else:
        asked.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
