"""Print the speed of copies and digests on this GPU: `python3 -m tests.support.gpu_copy_speed`.

Unit: GB/s of payload; a copy within the GPU reads and writes each byte. Measured first with an idle
engine, then with one step running and another one enqueued, about 50 ms each.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from kv_transfer.cache.gpu_memory import copy_stream
from tests.support.gpu_caches import missing_gpu, on_gpu, random_cache

if TYPE_CHECKING:
    from collections.abc import Callable


def engine(closing: threading.Event) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ends = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
    while not closing.is_set():
        for end in ends:
            end.synchronize()
            for _ in range(30):  # 1.1 TFLOP each
                torch.mm(a, a)
            end.record()


def gb_s(work: Callable[[], object], size: int) -> float:
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        work()
        torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - begun)
    return size / sorted(times)[10] / 1e9


def main() -> None:
    if reason := missing_gpu():
        raise SystemExit(reason)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)  # noqa: T201 - its purpose
    for layout in ("LBNHC", "BLHNC"):
        _, region = on_gpu(random_cache(1, layers=32), layout)
        for ids in ([*range(8)], [*range(64)]):
            size = region.size_bytes(len(ids))
            staging, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in "ab")
            with torch.cuda.stream(copy_stream(staging.device)):
                for state in ("idle", "busy"):
                    closing = threading.Event()
                    beside = threading.Thread(target=engine, args=[closing])
                    if state == "busy":
                        beside.start()
                        time.sleep(1.0)
                    speeds = {
                        "copy": gb_s(lambda: other.copy_(staging), size),  # noqa: B023
                        "gather": gb_s(lambda: region.gather(ids, staging), size),  # noqa: B023
                        "scatter": gb_s(lambda: region.scatter(ids, staging), size),  # noqa: B023
                        "digests": gb_s(lambda: region.digests(ids), size),  # noqa: B023
                    }
                    closing.set()
                    if state == "busy":
                        beside.join()
                    row = ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
                    print(layout, f"{size >> 20} MiB, engine {state}: {row}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
