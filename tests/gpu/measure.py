"""Print the speed of copies and digests on this GPU: `python3 -m tests.gpu.measure`.

GB/s of payload: a copy within the GPU reads and writes each byte. `busy` is beside an engine that
has a step of 50 ms running and another one enqueued.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from kv_transfer.device.region import copy_stream, device_region
from tests.gpu.caches import HEADS, LAYOUTS, TOKENS, lack

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, BLOCKS, WIDTH = 32, 1024, 256  # Llama-3.1-8B: 2 MiB a block
STEP_S = 0.05


class Engine:
    """Keeps two steps of matrix products enqueued until it is closed."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(a)
        seconds = median_s(lambda: torch.mm(a, a, out=out))
        steps: deque[torch.cuda.Event] = deque()
        while not self._closing.is_set():
            for _ in range(max(1, int(STEP_S / seconds))):
                torch.mm(a, a, out=out)
            steps.append(torch.cuda.Event(blocking=True))
            steps[-1].record()
            if len(steps) > 1:
                steps.popleft().synchronize()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def median_s(work: Callable[[], object], rounds: int = 20) -> float:
    times = []
    for _ in range(rounds + 3):
        begun = time.perf_counter()
        work()
        torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times[3:])[rounds // 2]


def works_on(layout: str, count: int) -> tuple[int, dict[str, Callable[[], object]]]:
    """Return the bytes of `count` blocks and what is done with them."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH}
    memory = torch.zeros([sizes[name] for name in layout], dtype=torch.bfloat16, device="cuda")
    region = device_region(list(memory.permute([layout.index(name) for name in "LBHNC"])), BLOCKS)
    ids = list(range(0, 2 * count, 2))
    size = region.size_bytes(count)
    staging, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return size, {
        "copy": lambda: other.copy_(staging),
        "gather": lambda: region.gather(ids, staging),
        "scatter": lambda: region.scatter(ids, staging),
        "digests": lambda: region.digests(ids),
        "copy_from": lambda: region.copy_from(region, ids, ids),
    }


def main() -> None:
    if reason := lack():
        raise SystemExit(reason)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s idle / busy")
    with torch.cuda.stream(copy_stream(torch.device("cuda", 0))):
        for layout in LAYOUTS:
            for count in (8, 128):
                size, works = works_on(layout, count)
                idle = [size / median_s(work) / 1e9 for work in works.values()]
                engine = Engine()
                busy = [size / median_s(work) / 1e9 for work in works.values()]
                engine.close()
                rows = zip(works, idle, busy, strict=True)
                row = "  ".join(f"{name} {a:.1f} / {b:.1f}" for name, a, b in rows)
                say(f"{layout} {size >> 20} MiB  {row}")


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
