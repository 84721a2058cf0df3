"""A worker's process is killed (SIGKILL) while it has work in hand; `pdserve up` starts another."""

from __future__ import annotations

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


KILL_PREFILL = Kill("kill_prefill", "SIGKILL to a prefill worker in mid-prefill", "prefill")
KILL_DECODE = Kill("kill_decode", "SIGKILL to a decode worker in mid-answer", "decode")
