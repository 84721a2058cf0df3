"""A worker's process is stopped (SIGSTOP) with work in hand, and goes on later (SIGCONT) as if
nothing had been."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


@dataclass(frozen=True, slots=True)
class Freeze:
    """``seconds``: how long."""

    name: str
    what: str
    role: str
    seconds: float
    needs_vllm: bool = False

    async def run(self, scene: Scene) -> None:
        """It always goes on again."""
        _, pid = await scene.catch(self.role)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            scene.service.go_on_pid(pid)


FREEZE_PREFILL = Freeze(
    "freeze_prefill", "SIGSTOP to a prefill worker in mid-prefill, SIGCONT 4 s later", "prefill", 4
)
FREEZE_DECODE = Freeze(
    "freeze_decode", "SIGSTOP to a decode worker in mid-answer, SIGCONT 4 s later", "decode", 4
)
# Longer than all leases: it comes back as one believed dead.
EXPIRED_KV_LEASE = Freeze(
    "expired_kv_lease",
    "SIGSTOP to a decode worker for 12 s: longer than its lease, and than the lease of the blocks "
    "that prefill workers hold for it",
    "decode",
    12,
)
