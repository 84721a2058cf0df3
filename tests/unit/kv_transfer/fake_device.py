"""A GPU's memory, streams and events in host memory, and transports over it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from typing import TYPE_CHECKING

from kv_transfer.device.base import StreamError
from kv_transfer.device.staging import StagingLimits
from kv_transfer.errors import KvTransferError
from kv_transfer.nccl.actions import PairTimeouts
from kv_transfer.nccl.pool import PoolLimits
from kv_transfer.reshard import Span
from kv_transfer.transport.cuda_ipc import CudaIpcTransport, IpcLimits
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


class FakeSharingDevice(FakeDevice):
    """Its memory is files of memory, which another process of this host may map. `slow`: copies
    begin, and their events do not fire before the test sets them."""

    def __init__(self, nccl: FakeNccl | None = None, uuid: str = "") -> None:
        super().__init__(nccl or FakeNccl(Fabric()), uuid)
        self.files: dict[int, tuple[int, mmap.mmap]] = {}
        self.opened: dict[int, tuple[bytes, mmap.mmap]] = {}
        self.copies: list[FakeEvent] = []
        self.slow = False

    def allocate(self, size_bytes: int) -> int:
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, size_bytes)
        memory = mmap.mmap(fd, size_bytes)
        memory[:] = bytes([POISON]) * size_bytes
        self.files[_address(memory)] = fd, memory
        return _address(memory)

    def free(self, address: int) -> None:
        fd, memory = self.files.pop(address)
        memory.close()
        os.close(fd)

    def export_memory(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self.files[address][0]}".encode().ljust(64, b"\0")

    def open_memory(self, handle: bytes) -> int:
        assert all(handle != opened for opened, _ in self.opened.values()), "opened twice"
        try:
            fd = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        except (OSError, ValueError) as error:
            raise StreamError(f"invalid handle: {error}") from error
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        self.opened[_address(memory)] = handle, memory
        return _address(memory)

    def close_memory(self, address: int) -> None:
        self.opened.pop(address)[1].close()

    def copy(self, target: int, source: int, size_bytes: int) -> FakeEvent:
        ctypes.memmove(target, source, size_bytes)
        self.copies.append(FakeEvent(is_set=not self.slow))
        return self.copies[-1]


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def ipc_transport(slot_bytes: int = 512, op_timeout_s: float = WAIT_S) -> CudaIpcTransport:
    """One process's."""
    transport = CudaIpcTransport(
        FakeSharingDevice(), IpcLimits(StagingLimits(2, slot_bytes), op_timeout_s)
    )
    transport.quarantined.rest_s = 0.01
    return transport


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
    if isinstance(transport, CudaIpcTransport):
        _check_ipc(transport)
    if not isinstance(transport, NcclTransport):
        return
    device = transport.device
    assert isinstance(device, FakeDevice)
    assert (transport.held_slots, transport._ends) == (0, {})
    assert transport.lost_slots or not device.memory
    assert device._nccl.live == set()
    assert device.open == set()


def _check_ipc(transport: CudaIpcTransport) -> None:
    device = transport.device
    assert isinstance(device, FakeSharingDevice)
    assert (transport.held_slots, transport._peers, len(transport.quarantined)) == (0, {}, 0)
    assert transport.lost_slots or not (device.files or device.opened)


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
