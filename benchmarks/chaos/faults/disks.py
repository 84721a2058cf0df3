"""The disk with the logs is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.chaos.orders import Order

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


class DiskFull:
    """Under the logs of all processes."""

    name = "disk_full"
    what = "every write of every process to its log fails with ENOSPC, and a worker is killed too"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """With something to log in it: a worker that dies."""
        names = ("router", *scene.service.names)
        await scene.until_open(1)
        before = scene.service.hits(*names)
        scene.struck()
        for name in names:
            scene.service.order(name, Order(logs="full"))
        try:
            await scene.until(
                lambda: scene.service.hits(*names) - before >= len(names), "they all full"
            )
            _, pid = await scene.catch("decode")
            scene.service.kill_pid(pid)
            await scene.service.until_whole()
        finally:
            for name in names:
                scene.service.order(name, Order())


DISK_FULL = DiskFull()
