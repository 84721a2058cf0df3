"""KV between two GPUs, sent by NCCL.

Each link has at most one communicator of two ranks: 0 sends, 1 receives. If blocks are contiguous,
long enough and have the same layout at both ends, they are sent directly from cache to cache. Else
they pass through a slot at each end, in parts: while one part is sent, the next is gathered and the
previous one scattered. The sequence for each slot, and without staging for each group of NCCL:

    producer: wait for room ─ Offer with id ► consumer: wait for room
              join                              join                   (only if none is open)
              take a slot ── Chunk, Offer ──►   take a slot, post the receives, scatters behind them
              post the sends   ◄── Clear ────   (after the first receive is posted)
              later: free the slot              later: free the slot

Neither end waits for the bytes: the next sequence begins while they move, if there is a slot. Nor
does the producer wait for Clear before the next Offer: two may be unanswered, in the order of which
the answers come. Both ends post in the order of the offers, so NCCL pairs the same operations.

An offer over a communicator that the consumer has freed is void, and so are all behind it. The
producer joins a new communicator and offers the same runs again. In the chunk that lacks them, the
consumer sets aside other messages until it is complete.

Rules (docs/kv_transfer.md says which failure of vLLM's NCCL connector each one answers):

* Neither end posts before the other is ready to post. A kernel that waits for its peer holds thread
  blocks that the model's own collectives need.
* NCCL has no deadlines, so each of our waits has one, and checks the link while it polls. At a
  deadline, an error, or the end of the link, the communicator is aborted and the link closed; the
  router retries the requests. The slots are free again when the GPU is idle, else lost. A
  consumer's blocks are released only when the GPU is idle.
* All waits poll. The threads of a link make its NCCL calls, so a slow abort blocks no other link.
* Communicators hold memory outside the KV cache, within a budget. Above it, the least recently used
  idle one is freed. Another link never frees one in use; while others wait, its own link frees it
  after a turn.
* A thread that holds a slot waits only for a slot of the consumer, or for bytes in flight.

Events on the GPU order the gather, send and scatter of a part, so the host waits only once. The
first operation of a communicator is slow, because it connects. A new link therefore sends one byte
while the prefill computes.

On a GPU only blocks without staging were sent yet, between two processes (benchmarks/results).
tests/unit/kv_transfer/test_nccl.py runs it over a fake NCCL, tests/gpu over a real one.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from kv_transfer.cache.gpu_memory import device_regions
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.transport import Transport, TransportUnavailable, TransportUsage
from kv_transfer.settings import WINDOW
from kv_transfer.transport.nccl.communicators import Communicator, Communicators
from kv_transfer.transport.nccl.limits import RECEIVER, SENDER
from kv_transfer.transport.nccl.link_ends import NcclConsumer, NcclProducer, Resources
from kv_transfer.transport.nccl.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.cache.gpu_memory import DeviceRegion
    from kv_transfer.protocol.link import ConsumerChannel, Link, ProducerChannel
    from kv_transfer.protocol.transport import LocalKv
    from kv_transfer.transport.nccl.binding import Nccl
    from kv_transfer.transport.nccl.limits import Limits
    from kv_transfer.transport.nccl.staging import Gpu

logger = logging.getLogger(__name__)

# Two ranks on one GPU, which NCCL otherwise refuses: docs/userguide/source/env.rst of NCCL 2.30.
ONE_GPU_VERSION = 23003
ONE_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
# NCCL never compares these between ranks: two that differ wait for each other. vLLM sets some of
# them in one process for batch-invariant answers (vllm/utils/nccl.py).
AGREED_VARIABLES = (
    *("NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_NET_DISABLE", "NCCL_PROTO", "NCCL_SHM_DISABLE"),
)


class NcclTransport(Transport):
    """The NCCL transport of a process. The first link of a direction allocates its memory."""

    name = "nccl"

    def __init__(self, nccl: Nccl, gpu: Gpu, limits: Limits) -> None:
        self._nccl = nccl
        self._gpu = gpu
        self._limits = limits
        self._communicators = Communicators(limits)
        self._version = nccl.version()
        self._staging: dict[int, Staging] = {}
        self._lock = threading.Lock()

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        try:
            slot_bytes = self._slot_bytes(local)
        except KvTransferError as error:
            logger.warning("NCCL is not offered: %s", error)
            return None
        return {
            "version": self._version,
            "gpu": self._gpu.uuid,
            "slot_bytes": slot_bytes,
            "environment": _environment(),
            "blocks": [[n, each.block_layout] for n, each in _regions_of(local).items()],
        }

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        version, gpu, slot_bytes = (offer.get(key) for key in ("version", "gpu", "slot_bytes"))
        if type(version) is not int or not isinstance(gpu, str) or type(slot_bytes) is not int:
            raise TransportUnavailable("the offer is not NCCL's")
        if version != self._version:
            # NCCL would also refuse, but its error names neither version.
            raise TransportUnavailable(f"NCCL {self._version} here and {version} there")
        _check_environment(offer.get("environment"))
        is_allowed = self._version >= ONE_GPU_VERSION and os.environ.get(ONE_GPU_VARIABLE) == "1"
        if gpu == self._gpu.uuid and not is_allowed:
            raise TransportUnavailable(f"both workers use GPU {gpu}, and NCCL takes a GPU once")
        try:
            staging = self.staging(RECEIVER, local)
        except KvTransferError as error:
            raise TransportUnavailable(str(error)) from error
        slot_bytes = min(slot_bytes, staging.slot_bytes)
        if slot_bytes < local.block_bytes:
            raise TransportUnavailable(f"a slot of {slot_bytes} bytes holds no block")
        regions, theirs = _regions_of(local), offer.get("blocks")
        try:
            layouts = {int(group): layout for group, layout in theirs or ()}
        except (TypeError, ValueError):
            raise TransportUnavailable("the offer is not NCCL's") from None
        direct = [
            group
            for group, region in regions.items()
            if (layout := region.block_layout) is not None
            and layout == layouts.get(group)
            and region.geometry.block_bytes >= self._limits.min_direct_bytes
        ]
        run = self._limits.max_group
        details = {"slot_bytes": slot_bytes, "direct": direct, "direct_run": run, "window": WINDOW}
        resources = self._resources(RECEIVER, local, slot_bytes, direct, run, WINDOW)
        return NcclConsumer(self._communicator(RECEIVER, link), link, resources), details

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        slot_bytes = details.get("slot_bytes")
        if type(slot_bytes) is not int or slot_bytes < local.block_bytes:
            raise ProtocolError(f"slot_bytes {slot_bytes!r} holds no block")
        direct = details.get("direct")
        groups = list(local.regions)
        if not isinstance(direct, list) or not all(group in groups for group in direct):
            raise ProtocolError(f"direct {direct!r} is not a list of groups")
        slot_bytes = min(slot_bytes, self.staging(SENDER, local).slot_bytes)
        # Consumers of version 0.1 accept at most one slot at a time.
        run = details.get("direct_run", slot_bytes // local.block_bytes)
        if type(run) is not int or run < 1:
            raise ProtocolError(f"direct_run {run!r} is not a number of blocks")
        run = min(run, self._limits.max_group)
        # Consumers of version 0.1 accept the next offer when they have answered the last one.
        window = details.get("window", 1)
        if type(window) is not int or window < 1:
            raise ProtocolError(f"window {window!r} is not a number of offers")
        window = min(window, WINDOW)
        resources = self._resources(SENDER, local, slot_bytes, direct, run, window)
        return NcclProducer(self._communicator(SENDER, link), link, resources)

    def _resources(
        self,
        rank: int,
        local: LocalKv,
        slot_bytes: int,
        direct: Sequence[int],
        direct_run: int,
        window: int,
    ) -> Resources:
        return Resources(
            self._nccl,
            self._gpu,
            self._limits,
            self.staging(rank, local),
            _regions_of(local),
            slot_bytes,
            frozenset(direct),
            direct_run,
            window,
        )

    def _communicator(self, rank: int, link: Link) -> Communicator:
        return Communicator(rank, self._nccl, self._gpu, self._limits, self._communicators, link)

    def close(self) -> None:
        with self._lock:
            self._staging.clear()

    def _slot_bytes(self, local: LocalKv) -> int:
        """Return the size of a slot. Raises KvTransferError if the KV cache is not on this GPU."""
        region = next(iter(_regions_of(local).values()))
        if region.views[0].device != self._gpu.device:
            raise KvTransferError(f"the KV cache is not in the memory of {self._gpu.device}")
        return max(self._limits.slot_bytes, local.block_bytes)

    def staging(self, rank: int, local: LocalKv) -> Staging:
        """Return the slots of one direction, allocated when its first link takes this transport.
        Raises KvTransferError if there is no memory for them."""
        size = self._slot_bytes(local)
        with self._lock:
            if rank not in self._staging:
                try:
                    made = Staging(self._gpu, self._limits.slots, size)
                except RuntimeError as error:
                    raise KvTransferError(f"no memory for staging slots: {error}") from error
                self._staging[rank] = made
            return self._staging[rank]

    def usage(self) -> TransportUsage:
        """Return the memory held outside the KV cache. The memory of communicators is an estimate,
        the same as for the budget."""
        stagings = tuple(self._staging.values())
        held = sum(staging.held_bytes for staging in stagings)
        pool = self._communicators
        held += pool.held_bytes
        totals = {
            "nccl_made": float(pool.made),
            "nccl_evicted": float(pool.evicted),
            "nccl_aborted": float(pool.aborted),
        }
        return TransportUsage(held, sum(staging.lost for staging in stagings), totals)


def _regions_of(local: LocalKv) -> dict[int, DeviceRegion]:
    """Return the regions of a GPU cache. Raises KvTransferError if it is in host memory."""
    regions = device_regions(local.regions)
    if not regions:
        raise KvTransferError("the KV cache is not in GPU memory")
    return regions


def _environment() -> dict[str, str]:
    return {x: value for x in AGREED_VARIABLES if (value := os.environ.get(x)) is not None}


def _check_environment(theirs: Any) -> None:
    """Raise TransportUnavailable if the producer's NCCL is set otherwise. A producer before version
    0.3 does not report its settings."""
    if not isinstance(theirs, dict):
        return
    ours = _environment()
    for name in AGREED_VARIABLES:
        here, there = (x.get(name, "unset") for x in (ours, theirs))
        if here != there:
            raise TransportUnavailable(f"{name} is {here} here and {there} there")
