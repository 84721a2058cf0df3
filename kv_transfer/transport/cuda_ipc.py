"""Between two processes of one host, on two GPUs that reach each other or on the same one: the
target lets its sources map one staging ring, once, and they write into it. How a chunk travels is
in kv_transfer/ipc/channels.py; what all links of the process share is here.

The ring is plain device memory of its own: nothing of another allocator is ever shared, so nobody
else's memory has to outlive a peer.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transfer.device.base import StreamError
from kv_transfer.device.staging import LOOK_S, Staging, StagingLimits
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.ipc.channels import IpcSource, IpcTarget, Kv, PeerRing
from kv_transfer.ipc.credits import Quarantine
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import PeerMemory, SharedMemory, WriteFence, boot_id
from kv_transfer.transport.base import Account, TransportUnavailable

if TYPE_CHECKING:
    from kv_transfer.device.base import SharingDevice
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, SourceChannel, TargetChannel, Wire

logger = logging.getLogger(__name__)

# How long a close waits for slots in quarantine.
CLOSE_S = 3.0
_MAX_SLOT = 1 << 62
_MAX_SLOTS = 1 << 16
# A memfd of one byte carries the fences; its locks need no more.
_FENCE = KvGeometry(1, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class IpcLimits:
    """`op_timeout_s`: how long a peer may take for its next word, or a slot to become free."""

    staging: StagingLimits = field(default_factory=StagingLimits)
    op_timeout_s: float = 60.0


@dataclass(slots=True)
class _Mapping:
    """A peer's ring, mapped once for all links to it."""

    address: int
    links: int = 0


class CudaIpcTransport:
    """One a process. The ring and the sending slots begin with the first link that needs them.
    Released by `close`."""

    name = "cuda_ipc"

    def __init__(self, device: SharingDevice, limits: IpcLimits) -> None:
        self.device = device
        self.op_timeout_s = limits.op_timeout_s
        self.quarantined = Quarantine()
        self._limits = limits
        self._lock = threading.Lock()
        self._ring: Staging | None = None
        self._handle = b""
        self._sending: Staging | None = None
        self._fences: SharedMemory | None = None
        self._mappings: dict[bytes, _Mapping] = {}
        self._peers: dict[PeerRing, tuple[bytes, PeerMemory]] = {}
        self._stuck: list[PeerMemory] = []

    # -- Transport

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        try:
            self._check(local, self._limits.staging.slot_bytes)
            self._begin_ring()
        except KvTransferError as error:
            logger.warning("cuda_ipc is not offered: %s", error)
            return None
        assert self._fences is not None
        return {
            "transport": self.name,
            "boot_id": boot_id(),
            "handle": self._handle,
            "slots": self._limits.staging.slots,
            "slot_bytes": self._limits.staging.slot_bytes,
            "path": self._fences.path,
            "inode": self._fences.inode,
            "slot": slot,
        }

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        self._begin_ring()
        assert self._ring is not None
        assert self._fences is not None
        fence = WriteFence(self._fences.fd, slot)
        return IpcTarget(self, Kv(local.region, self._ring), fence, wire)

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        if offer.get("boot_id") != boot_id():
            raise TransportUnavailable("the workers run on different hosts")
        try:
            slots, size, slot, inode = (
                _number(offer, key) for key in ("slots", "slot_bytes", "slot", "inode")
            )
            handle, path = offer["handle"], offer["path"]
            if not isinstance(handle, bytes) or not isinstance(path, str):
                raise ValueError("no handle, or no path")
            if not 1 <= slots <= _MAX_SLOTS or not 0 <= slot < _MAX_SLOT:
                raise ValueError("no such slot")
            self._check(local, min(size, self._limits.staging.slot_bytes))
            sending = self._begin_sending()
            fences = PeerMemory(path, inode, 1, _FENCE)
        except (KeyError, ValueError, OSError, StreamError, UnsupportedLayout) as error:
            raise TransportUnavailable(f"cannot use the target's ring: {error}") from error
        try:
            ring = PeerRing(self._map(handle), slots, size, slot)
        except StreamError as error:
            fences.close()
            raise TransportUnavailable(f"cannot map the target's ring: {error}") from error
        with self._lock:
            self._peers[ring] = handle, fences
        fence = WriteFence(fences.fd, slot)
        return IpcSource(self, Kv(local.region, sending), ring, fence, wire)

    def close(self) -> None:
        end = time.monotonic() + CLOSE_S
        self.sweep()
        while len(self.quarantined) and time.monotonic() < end:
            time.sleep(LOOK_S)
            self.sweep()
        for staging in (self._ring, self._sending):
            if staging is not None and not staging.close():
                logger.warning("staging slots are still in use: their memory stays")
        if self._fences is not None:
            self._fences.close()

    # -- Owner

    def try_slot(self) -> int | None:
        self.sweep()
        return None if self._ring is None else self._ring.try_acquire()

    def quarantine(self, slots: set[int], fence: WriteFence) -> None:
        with self._lock:
            self.quarantined.add(set(slots), fence.seal)

    def leave(self, ring: PeerRing, *, is_stuck: bool) -> None:
        with self._lock:
            handle, fences = self._peers.pop(ring)
            if is_stuck:
                # The descriptor holds the fence, for as long as the copy may run: for good.
                self._stuck.append(fences)
                return
            mapping = self._mappings[handle]
            mapping.links -= 1
            if not mapping.links:
                del self._mappings[handle]
                self.device.close_memory(mapping.address)
        fences.close()

    # -- for the status

    def sweep(self) -> None:
        """Gives back the slots whose quarantine is over."""
        with self._lock:
            safe = self.quarantined.take_safe(time.monotonic())
        for slot in safe:
            assert self._ring is not None
            self._ring.release(slot)

    def account(self) -> Account:
        """The ring and the sending slots."""
        begun = [x for x in (self._ring, self._sending) if x is not None]
        return Account(sum(staging.limits.held_bytes for staging in begun))

    @property
    def held_slots(self) -> int:
        """Slots in use, in both directions, those in quarantine too."""
        return sum(staging.held for staging in (self._ring, self._sending) if staging is not None)

    @property
    def lost_slots(self) -> int:
        """Slots that are unsafe for good."""
        return sum(staging.lost for staging in (self._ring, self._sending) if staging is not None)

    # -- inside

    def _check(self, local: LocalKv, slot_bytes: int) -> None:
        self.device.mover(local.region)
        block_bytes = local.region.geometry.block_bytes
        if slot_bytes < block_bytes:
            raise TransportUnavailable(
                f"a slot of {slot_bytes} bytes holds no block of {block_bytes}"
            )

    def _begin_ring(self) -> None:
        with self._lock:
            if self._ring is None:
                ring = Staging(self.device, self._limits.staging)
                self._handle = self.device.export_memory(ring.base)
                self._fences = SharedMemory("pdserve-ipc")
                self._fences.grow(1)
                self._ring = ring

    def _begin_sending(self) -> Staging:
        with self._lock:
            if self._sending is None:
                self._sending = Staging(self.device, self._limits.staging)
            return self._sending

    def _map(self, handle: bytes) -> int:
        with self._lock:
            mapping = self._mappings.get(handle)
            if mapping is None:
                mapping = self._mappings[handle] = _Mapping(self.device.open_memory(handle))
            mapping.links += 1
            return mapping.address


def _number(offer: dict[str, Any], key: str) -> int:
    value = offer[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is no number")
    return value


def limits_from(settings: KvSettings) -> IpcLimits:
    """What the settings allow."""
    staging = StagingLimits(settings.staging_slots, settings.staging_slot_bytes)
    return IpcLimits(staging, settings.receive_timeout_s)
