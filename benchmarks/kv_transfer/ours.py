"""The transports of `kv_transfer`, driven as vLLM's worker process drives them: without digests,
as the peers, and with one of every chunk, as it is unless told otherwise."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from kv_transfer.digest import DigestMode
from kv_transfer.errors import KvTransferError
from kv_transfer.handshake import Identity
from kv_transfer.protocol.plan import Shard
from kv_transfer.settings import KvSettings
from kv_transfer.transport import make
from kv_transfer.transport.base import LocalKv
from kv_transfer.vllm.step import (
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
)
from kv_transfer.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from benchmarks.kv_transfer.cases import Trip
    from benchmarks.kv_transfer.ends import AnyCache
    from kv_transfer.layout import KvGeometry

# Each way's transport, and what it digests.
WAYS = {
    "shm": ("shm", DigestMode.OFF),
    "shm digest": ("shm", DigestMode.ALWAYS),
    "tcp": ("tcp", DigestMode.OFF),
    "tcp digest": ("tcp", DigestMode.ALWAYS),
    "nccl": ("nccl", DigestMode.OFF),
}
ARRIVAL_S = 60.0
SOURCE, TARGET = "bench-source", "bench-target"


class _Watched(WorkerHalf):
    """Tells when a transfer may be over; vLLM asks after each step instead."""

    def __init__(self, way: str, instance_id: str) -> None:
        transport, digest = WAYS[way]
        settings = KvSettings(transports=(transport,), digest=digest)
        super().__init__(settings, instance_id, make(settings))
        self.over = threading.Event()
        self.wake_with(self.over.set)


def _half(way: str, instance_id: str, cache: AnyCache, geometry: KvGeometry) -> _Watched:
    half = _Watched(way, instance_id)
    # One token a block: what a token is does not matter here.
    half.register(
        LocalKv(cache.region(geometry), cache.shared),
        Identity(instance_id, "bench"),
        Shard(1, geometry.page_bytes, 1),
    )
    return half


class OurSource:
    """Has the blocks of a prefill that ended; done with a trip when they are free again."""

    def __init__(self, way: str, cache: AnyCache, geometry: KvGeometry) -> None:
        self._half = _half(way, SOURCE, cache, geometry)

    def facts(self) -> Any:
        return self._half.address

    def connect(self, facts: Any) -> None:
        pass

    def arm(self, trip: Trip) -> None:
        half, name = self._half, f"t{trip.number}"
        half.over.clear()
        half.before_step(StepMetadata(expected=[SourceExpected(name, name)]))
        progress = SourceProgress(name, trip.source_ids, len(trip.source_ids))
        half.after_step(StepMetadata(progress=[progress]))
        half.before_step(StepMetadata(ended=[SourceEnded(name, (1,), held=True)]))

    def go(self, trip: Trip) -> float | None:
        half, name = self._half, f"t{trip.number}"
        # To answer sooner would have this process and its parent compute beside what is measured.
        while name not in half.take_results()[0]:
            if not half.over.wait(ARRIVAL_S):
                raise KvTransferError(f"nobody acknowledged {name}")
            half.over.clear()
        return None

    def close(self) -> None:
        self._half.close()


class OurTarget:
    """Grants its blocks; measures until the source's word that all are in place."""

    def __init__(self, way: str, cache: AnyCache, geometry: KvGeometry) -> None:
        self._half = _half(way, TARGET, cache, geometry)
        self._transport, _ = WAYS[way]
        self._source = ""

    def facts(self) -> Any:
        return None

    def connect(self, facts: Any) -> None:
        self._source = facts

    def arm(self, trip: Trip) -> None:
        pass

    def go(self, trip: Trip) -> float | None:
        half, name, ids = self._half, f"t{trip.number}", trip.target_ids
        half.over.clear()
        start = TargetStart(name, name, (self._source,), SOURCE, 0, len(ids), ids)
        begun = time.perf_counter()
        half.before_step(StepMetadata(starts=[start]))
        arrived = half.over.wait(ARRIVAL_S)
        seconds = time.perf_counter() - begun
        half.take_results()
        output = half.take_output()
        if not arrived or output is None or name not in output.arrivals:
            raise KvTransferError(f"{name} did not arrive: {output and output.failures}")
        used = output.arrivals[name].report.transport
        if used != self._transport:
            raise KvTransferError(f"{used} was used instead of {self._transport}")
        return seconds

    def close(self) -> None:
        self._half.close()
