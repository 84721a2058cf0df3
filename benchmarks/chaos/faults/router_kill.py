"""The router's process is killed. It keeps nothing: the streams that it had fail, workers register
with the next one, and whatever comes then is served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.chaos.service import WHOLE_S

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


class RouterKill:
    """Clients wait with new requests while there is no router."""

    name = "kill_router"
    what = "SIGKILL to the only router: its own open streams are lost, and nothing else"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """Excused is what was open at that moment, and nothing that was sent later."""
        await scene.until_open(2)
        pid = await scene.service.pid("router")
        scene.load.hold()
        scene.struck()
        scene.service.kill_pid(pid)
        scene.excused |= {x.number for x in scene.load.open()}
        scene.note(f"{len(scene.excused)} streams open")
        try:
            async with asyncio.timeout(WHOLE_S):
                await scene.service.until_both_roles()
        finally:
            scene.load.go_on()


class KillOfTwo:
    """Nothing is excused: whoever had its stream there goes on at the other one."""

    name = "kill_router_of_two"
    what = "SIGKILL to one of two routers: its clients go on with their answers at the other one"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """The one that has more of the streams, and no request waits for another."""
        await scene.until_open(4)
        service = scene.service
        name = await service.busiest_router()
        count = await service.outstanding(name)
        pid = await service.pid(name)
        scene.struck()
        service.kill_pid(pid)
        scene.note(f"{name} with {count} in hand")


ROUTER_KILL, KILL_OF_TWO = RouterKill(), KillOfTwo()
