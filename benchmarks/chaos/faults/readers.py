"""Clients that read slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


class SlowClients:
    """They get their answers, right and whole; nobody else waits for them."""

    name = "slow_clients"
    what = "4 clients take 0.1 s over each piece of their answers"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """The slow ones ask what others have asked, under numbers of their own."""
        await scene.until_open(4)
        scene.struck()
        chosen = [x.number for x in scene.load.open()][:4]
        for number in chosen:
            scene.load.repeat(number, slow_s=0.1)
        await scene.load.over()


SLOW_CLIENTS = SlowClients()
