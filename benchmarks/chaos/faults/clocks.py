"""The wall clock of some processes jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.chaos.orders import Order

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


@dataclass(frozen=True, slots=True)
class ClockJump:
    """``seconds``: by how much; ``names``: whose."""

    name: str
    what: str
    seconds: float
    names: tuple[str, ...]
    needs_vllm: bool = False

    async def run(self, scene: Scene) -> None:
        """And back again two seconds later."""
        await scene.until_open(1)
        await scene.ordered(Order(clock_s=self.seconds), *self.names, seconds=2.0)


CLOCK_JUMP = ClockJump(
    "clock_jump",
    "the wall clock of router, prefill-0 and decode-0 jumps an hour ahead, and 2 s later back",
    3600.0,
    ("router", "prefill-0", "decode-0"),
)
