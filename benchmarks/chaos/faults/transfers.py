"""KV transfers that break, come late or come damaged, for a while, on one prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.chaos.orders import Order

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene


@dataclass(frozen=True, slots=True)
class Transfers:
    """``order``: what is done to every chunk that the worker sends."""

    name: str
    what: str
    order: Order
    needs_vllm: bool = False
    seconds: float = 2.0

    async def run(self, scene: Scene) -> None:
        """From the first answer on."""
        await scene.until_open(1)
        await scene.ordered(self.order, "prefill-0", seconds=self.seconds)


DROP = Transfers(
    "drop_transfers", "the link breaks at every chunk one prefill worker sends", Order("drop")
)
DELAY = Transfers(
    "delay_transfers",
    "every chunk one prefill worker sends comes 0.5 s late",
    Order("delay", delay_s=0.5),
)
DROP_TCP = Transfers(
    "drop_transfers_tcp",
    "KV over TCP: the link breaks at every chunk one prefill worker sends",
    Order("drop"),
    needs_vllm=True,
)
CORRUPT_TCP = Transfers(
    "corrupt_transfers_tcp",
    "KV over TCP: one bit is flipped in every chunk one prefill worker sends",
    Order("corrupt"),
    needs_vllm=True,
)
CORRUPT = Transfers(
    "corrupt_transfers",
    "one bit is flipped in every chunk one prefill worker sends, the repeated ones too",
    Order("corrupt"),
    needs_vllm=True,
)
