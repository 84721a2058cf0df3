"""Workers are killed (SIGKILL) while they have work in hand; `pdserve up` starts others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


@dataclass(frozen=True, slots=True)
class Kill:
    """``role``: of the worker."""

    name: str
    what: str
    role: str
    needs_vllm: bool = False

    async def run(self, scene: Scene) -> None:
        """Stopped first, so that what it has in hand is sure."""
        _, pid = await scene.catch(self.role)
        scene.service.kill_pid(pid)


@dataclass(frozen=True, slots=True)
class KillAll:
    """``roles``: all workers of these. For what is sent until there is one of each role again, a
    clean error is an answer too; whatever is sent later is answered."""

    name: str
    what: str
    roles: tuple[str, ...]
    needs_vllm: bool = False

    async def run(self, scene: Scene) -> None:
        """A third of the requests is sent while there is none, and the rest when they are back."""
        await scene.until_open(2)
        names = [name for role in self.roles for name in await scene.service.ready(role)]
        pids = {name: await scene.service.pid(name) for name in names}
        _ = await scene.catch("decode")
        scene.note(f"{len(scene.load.open())} answers open when {' and '.join(names)} were killed")
        for pid in pids.values():
            scene.service.kill_pid(pid)
        scene.workers_s = float("inf")
        enough = scene.load.unsent * 2 // 3
        await scene.until(lambda: scene.load.unsent <= enough, "so many sent")
        scene.load.hold()
        await scene.service.until_both_roles()
        scene.workers_s = time.monotonic()
        scene.load.go_on()


KILL_PREFILL = Kill("kill_prefill", "SIGKILL to a prefill worker in mid-prefill", "prefill")
KILL_DECODE = Kill("kill_decode", "SIGKILL to a decode worker in mid-answer", "decode")
KILL_ALL_DECODE = KillAll(
    "kill_all_decode",
    "SIGKILL to all decode workers in mid-answer: until one is back, prefill workers answer alone",
    ("decode",),
)
KILL_ALL = KillAll(
    "kill_all",
    "SIGKILL to all workers in mid-answer: until there are others, errors that say so",
    ("prefill", "decode"),
)
