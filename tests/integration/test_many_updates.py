"""Hundreds of updates of weights leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path

from tests.support.checkpoints import assert_spans, post, trained
from tests.support.cluster import PLAIN, PROMPT, Cluster

OURS = ("pdserve", "router", "workers", "kv_transfer")
WARM_UP, UPDATES = 10, 200


async def update(cluster: Cluster, directory: Path, step: int) -> None:
    body = {"weight_dir": str(directory / str(1 + step % 3)), "mode": "keep"}
    status, said = await post(cluster, "/update_weights", weight_version=f"step {step}", **body)
    assert status == 200, said


def kept(directory: Path) -> Counter[str]:
    """Count what this process, which has the router and all workers, keeps: objects of our classes
    by class, threads, tasks, open files, and files beside the checkpoints."""
    gc.collect()
    names = (f"{type(x).__module__}.{type(x).__qualname__}" for x in gc.get_objects())
    found = Counter(name for name in names if name.startswith(OURS))
    found["threads"] = threading.active_count()
    found["tasks"] = len(asyncio.all_tasks())
    found["open files"] = len(list(Path("/proc/self/fd").iterdir()))
    found["files"] = sum(1 for _ in directory.rglob("*"))
    return found


async def test_updates_leave_nothing_behind(tmp_path: Path) -> None:
    async with trained(tmp_path, prefill=1, decode=1) as (cluster, digests):
        for step in range(WARM_UP):
            await update(cluster, tmp_path, step)
        before = kept(tmp_path)
        for step in range(WARM_UP, WARM_UP + UPDATES):
            await update(cluster, tmp_path, step)
        grown = {name: (before[name], n) for name, n in kept(tmp_path).items() if n > before[name]}
        # What is kept of each update would be there hundreds of times.
        assert {name: x for name, x in grown.items() if x[1] - x[0] >= UPDATES // 10} == {}
        page = await cluster.metrics()
        assert f"step {WARM_UP}" not in page  # versions are no labels
        assert (
            f'weights_updates_total{{model="pdserve-demo",result="done"}} {WARM_UP + UPDATES}'
            in page
        )
        last = WARM_UP + UPDATES - 1
        answer = await cluster.ask(PROMPT, PLAIN)
        assert_spans(answer, {f"step {last}": digests[1 + last % 3]}, cluster)
