"""A GPU's memory, streams and events in host memory, and transports over it."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING

from kv_transfer.device.base import StreamError
from kv_transfer.device.staging import StagingLimits
from kv_transfer.errors import KvTransferError
from kv_transfer.nccl.actions import PairTimeouts
from kv_transfer.nccl.pool import PoolLimits
from kv_transfer.reshard import Span
from kv_transfer.transport.nccl import NcclLimits, NcclTransport
from tests.patience import WAIT_S
from tests.unit.kv_transfer.fake_nccl import Fabric, FakeEvent, FakeNccl, FakeStreams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.device.base import Mover
    from kv_transfer.memory import KvRegion
    from kv_transfer.transport.base import Transport

_GPUS = itertools.count()
POISON = 0xA5


class FakeMover:
    """Copies at once; see FakeDevice."""

    def __init__(self, device: FakeDevice, region: KvRegion) -> None:
        self._device = device
        self._region = region

    def _pages(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        g = self._region.geometry
        if self._device.refuses:
            raise StreamError("illegal address")
        if not g.has_blocks(block_ids):
            raise KvTransferError("a block id is outside its KV cache")
        places = [(layer, block) for layer in range(g.num_layers) for block in block_ids]
        start = self._region.address
        return [(start + g.page_offset(*place), g.page_bytes) for place in places]

    def _event(self) -> FakeEvent:
        event = FakeEvent(is_set=not self._device.holds)
        self._device.events.append(event)
        return event

    def gather(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> FakeEvent:
        pages = self._pages(block_ids)
        if tokens is not None:
            data = self._region.take(block_ids, tokens)
            ctypes.memmove(address, bytes(data), data.nbytes)
            return self._event()
        for n, (page, size) in enumerate(pages):
            ctypes.memmove(address + n * size, page, size)
        return self._event()

    def scatter(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> FakeEvent:
        pages = self._pages(block_ids)
        if tokens is not None:
            put_tokens(self._region, block_ids, tokens, address)
            return self._event()
        for n, (page, size) in enumerate(pages):
            ctypes.memmove(page, address + n * size, size)
        return self._event()


def put_tokens(region: KvRegion, block_ids: Sequence[int], tokens: Span, address: int) -> None:
    """Tokens into the middle of blocks too, by way of all that come before."""
    size = region.size_bytes(0, len(tokens))
    given = (ctypes.c_ubyte * size).from_address(address)
    layers = region.geometry.num_layers
    parts = [bytes(given[n * size // layers : (n + 1) * size // layers]) for n in range(layers)]
    if tokens.start:
        before = bytes(region.take(block_ids, Span(0, tokens.start)))
        step = len(before) // layers
        parts = [before[n * step : (n + 1) * step] + part for n, part in enumerate(parts)]
    held = block_ids[: -(-tokens.end // region.block_size)]
    region.put(held, tokens.end, memoryview(b"".join(parts)))


class FakeDevice(FakeStreams):
    """One process's GPU. `holds`: events do not fire before the test sets them. `refuses`:
    it begins no copy."""

    def __init__(self, nccl: FakeNccl, uuid: str = "") -> None:
        super().__init__(nccl)
        self.uuid = uuid or f"GPU-{next(_GPUS)}"
        self.memory: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}
        self.events: list[FakeEvent] = []
        self.holds = False
        self.refuses = False

    def allocate(self, size_bytes: int) -> int:
        if self.fails:
            raise StreamError("out of memory")
        memory = (ctypes.c_ubyte * size_bytes)()
        ctypes.memset(memory, POISON, size_bytes)
        self.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self.memory[address]

    def mover(self, region: KvRegion) -> Mover:
        if region.is_host:
            return FakeMover(self, region)
        # Only who has such a cache pays for torch.
        from kv_transfer.device.region import DeviceRegion
        from tests.unit.kv_transfer.torch_mover import TorchMover

        assert isinstance(region, DeviceRegion)
        return TorchMover(region)


# An orderly end is cut short: it waits for the other end, which may be gone.
TIMEOUTS = PairTimeouts(
    init_s=WAIT_S,
    offer_s=WAIT_S,
    idle_s=20.0,
    finalise_s=2.0,
    abort_s=WAIT_S,
    quarantine_s=WAIT_S,
    move_floor_s=WAIT_S,
)


def check_closed(transport: Transport) -> None:
    """Nothing of a transport that was closed is left: slots, channels, communicators, memory."""
    if not isinstance(transport, NcclTransport):
        return
    device = transport.device
    assert isinstance(device, FakeDevice)
    assert (transport.held_slots, transport._ends) == (0, {})
    assert transport.lost_slots or not device.memory
    assert device._nccl.live == set()
    assert device.open == set()


class NcclWorld:
    """The fabric between the NCCL transports of a test."""

    def __init__(self) -> None:
        self.fabric = Fabric()

    def transport(
        self,
        uuid: str = "",
        version: int = 23007,
        slot_bytes: int = 512,
        op_timeout_s: float = WAIT_S,
    ) -> NcclTransport:
        """One process's."""
        nccl = FakeNccl(self.fabric, version)
        limits = NcclLimits(
            PoolLimits(timeouts=TIMEOUTS), StagingLimits(2, slot_bytes), op_timeout_s
        )
        return NcclTransport(nccl, FakeDevice(nccl, uuid), limits)
