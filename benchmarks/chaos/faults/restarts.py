"""Every process of the service is restarted, one after the other, while it is asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene

_OPEN: Final = 4
_LOOK_S: Final = 0.05


class RollingRestart:
    """As docs/operations.md says, and no request is lost by it."""

    name = "rolling_restart"
    what = "SIGTERM to every worker and both routers, each when the one before it is back"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """A few requests are always on their way: what was asked is asked again and again."""
        await scene.until_open(2)
        service = scene.service
        scene.load.hold()
        asking = asyncio.create_task(_ask_on(scene))
        try:
            scene.struck()
            for name in (*service.names, *service.router_names):
                count = len(scene.load.open())
                service.end_pid(await service.pid(name))
                await service.until_whole()
                scene.note(f"{name} with {count} answers open")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            scene.load.go_on()


async def _ask_on(scene: Scene) -> None:
    numbers = sorted(scene.load.outcomes)
    while True:
        if len(scene.load.open()) < _OPEN:
            scene.load.repeat(scene.rng.choice(numbers))
        await asyncio.sleep(_LOOK_S)


ROLLING_RESTART = RollingRestart()
