"""A fake engine as a producer: its transfers, and the blocks held for their consumers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from pdserve.errors import TransferFailed
from pdserve.types import KvEndpoint, KvLedger
from workers.fake import transfers
from workers.fake.settings import matches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kv_transfer.settings import ConnectorConfig
    from workers.engine import DecodePhase, Work
    from workers.fake.settings import FakeFaults, FakeSettings
    from workers.fake.transfers import FakeKv

_MAX_REMEMBERED = 4096

# Producers of this process's started engines, by KV address. They are reached without a socket.
_local: dict[str, FakeProducer] = {}


@dataclass(slots=True)
class FreeBlocks:
    """`free` blocks of an engine. `changed` is set when a request may start."""

    free: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class _Transfer:
    """Blocks for a consumer. `handoff`: the computed KV. `gone`: why the transfer ended. Until the
    prefill is submitted, only the consumer is known."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.work: Work | None = None
        self.handoff: asyncio.Future[FakeKv] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        self.hold_end: asyncio.TimerHandle | None = None
        self.is_in_flight = False

    @property
    def blocks(self) -> int:
        return self.handoff.result().blocks if self.handoff.done() else 0

    async def wait(self, seconds: float, *what: asyncio.Future[FakeKv]) -> None:
        """Wait for `what`, or for the time. Raises TransferFailed if the transfer ends first."""
        futures: set[asyncio.Future[Any]] = {self.gone, *what}
        await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.gone.done():
            raise TransferFailed(self.gone.result())


class FakeProducer:
    """Serves blocks to consumers. State: expected and held transfers, and why others ended.
    `faults` may be set at any time."""

    def __init__(
        self, settings: FakeSettings, instance_id: str, kv: ConnectorConfig | None
    ) -> None:
        """Without `kv`, KV cannot leave the engine."""
        self.faults: FakeFaults = settings
        self._settings, self.pool = settings, FreeBlocks(settings.total_blocks)
        self._instance_id, self.kv = instance_id, kv
        self._transfers: dict[str, _Transfer] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()  # why transfers ended
        self._server: asyncio.Server | None = None
        self._address = f"local:{instance_id}"

    async def listen(self, model: str) -> KvEndpoint | None:
        """Serve consumers. Raises OSError if the KV address cannot be listened on."""
        if self.kv is None:
            return None
        if self._settings.listens:
            serve = partial(transfers.serve, self.lend)
            self._server = await asyncio.start_server(serve, self.kv.host, 0)
            self._address = f"{self.kv.host}:{self._server.sockets[0].getsockname()[1]}"
        _local[self._address] = self
        block_size = self._settings.block_size
        return KvEndpoint(
            addresses=(self._address,),
            compatibility=f"fake/{model}/{block_size}",
            layout={"engine": "fake", "block_size": str(block_size)},
            transports=("fake",),
            embedding_bytes=4,  # routers read it of encode workers alone
            copies=True,
        )

    def open(self, transfer_id: str, work: Work) -> None:
        """Expect the KV of `work`."""
        if transfer_id not in self._gone:  # its consumer may have given up before
            self._transfers.setdefault(transfer_id, _Transfer()).work = work

    def is_open(self, transfer_id: str) -> bool:
        """Return True if some work has this transfer."""
        transfer = self._transfers.get(transfer_id)
        return transfer is not None and transfer.work is not None

    def cancel(self, stream_id: int) -> None:
        """End the transfers of a stream."""
        for transfer_id, transfer in list(self._transfers.items()):
            if transfer.work is not None and transfer.work.stream_id == stream_id:
                self.drop(transfer_id, "the prefill was cancelled")

    def ledger(self) -> KvLedger:
        """Return the held blocks; their requests count as the engine's."""
        held = [x for x in self._transfers.values() if x.handoff.done()]
        return KvLedger(
            in_flight_blocks=sum(x.blocks for x in held if x.is_in_flight),
            leased_blocks=sum(x.blocks for x in held if not x.is_in_flight),
            transfers=len(held),
            engine_requests=len(held),
        )

    def close(self, reason: str) -> None:
        _local.pop(self._address, None)
        if self._server is not None:
            self._server.close()
        for transfer_id in list(self._transfers):
            self.drop(transfer_id, reason)

    def hold(self, transfer_id: str, handoff: FakeKv) -> None:
        """Hold computed blocks for the consumer until the hold ends."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or self.kv is None:
            self.pool.free += handoff.blocks
            return
        transfer.handoff.set_result(handoff)
        loop, reason = asyncio.get_running_loop(), "its hold has ended"
        transfer.hold_end = loop.call_later(self.kv.hold_s, self.drop, transfer_id, reason)

    def drop(self, transfer_id: str, reason: str) -> None:
        """End a transfer in any state, also one that is not open yet."""
        self._gone.setdefault(transfer_id, reason)
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            self.pool.free += transfer.blocks
            transfer.gone.set_result(f"transfer {transfer_id}: {reason}")
            if transfer.hold_end is not None:
                transfer.hold_end.cancel()
        self.pool.changed.set()

    @asynccontextmanager
    async def lend(self, transfer_id: str, instance_id: str) -> AsyncIterator[FakeKv]:
        """Yield the KV of a transfer once it is computed and has "arrived"; release its blocks at
        the end in any case. Raises TransferFailed."""
        if self.kv is None or instance_id != self._instance_id:
            raise TransferFailed("the prefill worker was restarted")
        if transfer_id in self._gone:
            raise TransferFailed(f"transfer {transfer_id}: {self._gone[transfer_id]}")
        transfer = self._transfers.setdefault(transfer_id, _Transfer())
        if transfer.is_in_flight:
            raise TransferFailed(f"transfer {transfer_id} is in flight already")
        try:
            await transfer.wait(self._settings.pairing_s, transfer.handoff)
            if transfer.work is None or not transfer.handoff.done():
                raise TransferFailed(f"transfer {transfer_id}: it is not known")
            transfer.is_in_flight = True
            if transfer.hold_end is not None:
                transfer.hold_end.cancel()
            loop = asyncio.get_running_loop()
            request_id, began = transfer.work.request_id, loop.time()
            if matches(self.faults.drop_transfer, request_id):
                raise TransferFailed("a scripted fault dropped the transfer")
            await transfer.wait(self._settings.transfer_s + self.faults.delay_transfer_s)
            handoff = structs.replace(transfer.handoff.result(), exposed_s=loop.time() - began)
            yield handoff
        finally:
            self.drop(transfer_id, "the consumer has it, or gave it up")


async def fetch(address: str, phase: DecodePhase) -> FakeKv:
    """Fetch the KV of a transfer. Raises TransferFailed, OSError, ValueError."""
    transfer_id, instance_id = phase.transfer_id, phase.producer_instance_id
    if producer := _local.get(address):
        async with producer.lend(transfer_id, instance_id) as handoff:
            return handoff
    return await transfers.fetch(address, transfer_id, instance_id)
