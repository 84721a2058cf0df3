"""Between two GPUs: gathered into a slot, one NCCL send a slot, scattered on the other side.

One communicator of two ranks a link, made when its first chunk goes and ended when it is idle or
the link is down. How a chunk travels is in kv_transfer/nccl/channels.py; what all links of the
process share is here.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transfer.device.base import StreamError
from kv_transfer.device.staging import Staging, StagingLimits
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.nccl.actions import PairTimeouts
from kv_transfer.nccl.binding import CommConfig, NcclUnavailable, check_versions
from kv_transfer.nccl.channels import Kv, NcclSource, NcclTarget
from kv_transfer.nccl.pool import PairKey, Pool, PoolLimits
from kv_transfer.nccl.thread import NcclThread
from kv_transfer.transport.base import Account, TransportUnavailable

if TYPE_CHECKING:
    from kv_transfer.device.base import Device
    from kv_transfer.nccl.actions import Op
    from kv_transfer.nccl.binding import Nccl
    from kv_transfer.nccl.messages import PairMessage
    from kv_transfer.nccl.pool import PoolStats
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, SourceChannel, TargetChannel, Wire

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
# Two ranks on one GPU, which NCCL otherwise refuses: docs/userguide/source/env.rst of NCCL 2.30.
ONE_GPU_VERSION = 23003
ONE_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
class NcclLimits:
    """What the transport may use. `op_timeout_s`: how long one slot's bytes may wait and travel,
    with a retry."""

    pool: PoolLimits = field(default_factory=PoolLimits)
    staging: StagingLimits = field(default_factory=StagingLimits)
    op_timeout_s: float = 60.0


class NcclTransport:
    """One a process. The thread and each direction's slots begin with the first link that needs
    them. Released by `close`."""

    name = "nccl"

    def __init__(self, nccl: Nccl, device: Device, limits: NcclLimits) -> None:
        self.device = device
        self.op_timeout_s = limits.op_timeout_s
        self._limits = limits
        self._version = nccl.version()
        self.thread = NcclThread(nccl, device, Pool(limits.pool), self)
        self._lock = threading.Lock()
        self._is_begun = False
        self._numbers = itertools.count(1)
        self._ends: dict[PairKey, NcclSource | NcclTarget] = {}
        self._staging: dict[str, Staging] = {}

    # -- Transport

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        try:
            self._kv("receive", local, self._limits.staging.slot_bytes)
        except KvTransferError as error:
            logger.warning("NCCL is not offered: %s", error)
            return None
        return {
            "transport": self.name,
            "version": self._version,
            "gpu": self.device.uuid,
            "slot_bytes": self._limits.staging.slot_bytes,
        }

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        return NcclTarget(self, self._kv("receive", local, self._limits.staging.slot_bytes), wire)

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        version, gpu, theirs = (offer.get(key) for key in ("version", "gpu", "slot_bytes"))
        if type(version) is not int or not isinstance(gpu, str) or type(theirs) is not int:
            raise TransportUnavailable("the offer is none of NCCL")
        try:
            check_versions(self._version, version)
            self._check_gpu(gpu)
            kv = self._kv("send", local, min(theirs, self._limits.staging.slot_bytes))
        except (NcclUnavailable, UnsupportedLayout, StreamError) as error:
            raise TransportUnavailable(str(error)) from error
        return NcclSource(self, kv, wire)

    def close(self) -> None:
        with self._lock:
            is_begun, self._is_begun = self._is_begun, False
        if is_begun and not self.thread.close(CLOSE_S):
            logger.warning("NCCL did not end in %g s: its staging memory stays", CLOSE_S)
            return
        for direction, staging in self._staging.items():
            if not staging.close():
                logger.warning("slots to %s are still in use: their memory stays", direction)

    # -- Hub

    def join(self, end: NcclSource | NcclTarget, rank: int) -> PairKey:
        with self._lock:
            # A link is never made twice: what a late message of an old one says is nobody's.
            key = PairKey(f"link {next(self._numbers)}", 0, rank)
            self._ends[key] = end
            if not self._is_begun:
                self._is_begun = True
                self.thread.start()
        return key

    def leave(self, key: PairKey) -> None:
        with self._lock:
            self._ends.pop(key, None)

    # -- PairOwner

    def send(self, key: PairKey, message: PairMessage) -> None:
        end = self._ends.get(key)
        if end is not None:
            end.tell(message)

    def ended(self, key: PairKey, op: Op, reason: str, *, is_lost: bool) -> None:
        end = self._ends.get(key)
        if end is not None:
            end.ended(op, reason, is_lost=is_lost)

    # -- for the status

    def stats(self) -> PoolStats:
        """Of the communicators."""
        return self.thread.stats()

    def account(self) -> Account:
        """Communicators by their budget's reckoning, and staging."""
        stats = self.stats()
        held = stats.reserved_bytes + sum(
            x.limits.held_bytes for x in tuple(self._staging.values())
        )
        counted = ("made", "evicted", "aborted", "stale_messages")
        return Account(held, {f"nccl_{name}": getattr(stats, name) for name in counted})

    @property
    def held_slots(self) -> int:
        """Slots in use, in both directions."""
        return sum(staging.held for staging in self._staging.values())

    @property
    def lost_slots(self) -> int:
        """Slots that are unsafe for good."""
        return sum(staging.lost for staging in self._staging.values())

    # -- inside

    def _check_gpu(self, gpu: str) -> None:
        if gpu != self.device.uuid:
            return
        allowed = self._version >= ONE_GPU_VERSION and os.environ.get(ONE_GPU_VARIABLE) == "1"
        if not allowed:
            raise TransportUnavailable(f"both workers use GPU {gpu}, and NCCL takes a GPU once")

    def _kv(self, direction: str, local: LocalKv, slot_bytes: int) -> Kv:
        self.device.mover(local.region)
        block_bytes = local.region.geometry.block_bytes
        if slot_bytes < block_bytes:
            raise TransportUnavailable(
                f"a slot of {slot_bytes} bytes holds no block of {block_bytes}"
            )
        with self._lock:
            if direction not in self._staging:
                self._staging[direction] = Staging(self.device, self._limits.staging)
            return Kv(local.region, self._staging[direction], slot_bytes)


def limits_from(settings: KvSettings) -> NcclLimits:
    """What the settings allow. Raises ValueError where they allow no communicator."""
    return NcclLimits(
        PoolLimits(
            budget_bytes=settings.nccl_budget_bytes,
            config=CommConfig(max_ctas=settings.nccl_max_ctas),
            timeouts=PairTimeouts(init_s=settings.nccl_init_timeout_s),
        ),
        StagingLimits(settings.staging_slots, settings.staging_slot_bytes),
        op_timeout_s=settings.receive_timeout_s,
    )
