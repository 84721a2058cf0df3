"""Worker halves without engines: the test acts as the scheduler, the caches have random bytes."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kv_transfer.cache.geometry import KvGroup
from kv_transfer.protocol import snapshot
from kv_transfer.protocol.peers import MAX_LINKS, MAX_UNFINISHED, Peers
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.settings import ConnectorConfig
from kv_transfer.transport.mapped import MappedTransport
from kv_transfer.transport.nixl import NixlTransport
from kv_transfer.transport.tcp import TcpTransport
from kv_transfer.vllm.step import (
    Arrival,
    ConsumerDeclined,
    ConsumerStart,
    ProducerEnded,
    ProducerExpected,
    ProducerProgress,
    StepMetadata,
)
from kv_transfer.vllm.worker_half import WorkerHalf
from tests.support.kv_caches import HostCache, geometry
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.cache.geometry import KvGeometry
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.transport import Transport
    from tests.support.pki import Ca

BLOCK_SIZE = 4
FROM = [5, 6, 2, 20]
TO = [9, 3, 4, 17]
N = 14  # tokens: four blocks, the last one partial
TOKENS = (7, 8)  # sampled by the producer
TRANSPORTS: dict[str, Callable[[ConnectorConfig], Transport]] = {
    "shm": MappedTransport,
    "tcp": lambda settings: TcpTransport(),
    "nixl": NixlTransport,
}
# Timeouts so long that no test reaches them. A test of a timeout overrides it.
PATIENT = {
    "hold_s": 3600.0,
    "receive_timeout_s": 3600.0,
    "handshake_timeout_s": WAIT_S,
    "send_timeout_s": WAIT_S,
    "preempt_timeout_s": WAIT_S,
}


def until(condition: Callable[[], object], *workers: KvWorker) -> None:
    """Step the workers until the condition is true."""
    end = time.monotonic() + WAIT_S
    pause = threading.Event()
    while True:
        for worker in workers:
            worker.collect()
        if condition():
            return
        assert time.monotonic() < end, [worker.look() for worker in workers]
        pause.wait(0.002)


def tls_files(ca: Ca, role: str = "worker") -> dict[str, str]:
    """Return the settings of a worker with a new certificate."""
    files = ca.issue(role, role=role)
    return {"tls_cert_file": files.cert, "tls_key_file": files.key, "tls_ca_file": ca.path}


def own_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("kv-")]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@dataclass(eq=False)
class KvWorker:
    """One worker half with its cache, and all its reports. Released by `close`."""

    instance_id: str
    transports: Sequence[Transport]
    shape: KvGeometry = field(default_factory=geometry)
    settings: ConnectorConfig = field(default_factory=ConnectorConfig)
    compatibility: str = "same"
    shared: bool = True
    shard: Shard | None = None
    has_draft_kv: bool = False
    max_links: int = MAX_LINKS
    max_unfinished: int = MAX_UNFINISHED
    sent: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed = zlib.crc32(self.instance_id.encode())
        self.cache = HostCache(self.shape, seed=seed, shared=self.shared)
        names = tuple(each.name for each in self.transports)
        if names:
            self.settings = structs.replace(self.settings, transports=names)
        shard = self.shard or Shard(
            1, self.shape.page_bytes, KvGroup(0, BLOCK_SIZE), (self.shape.num_layers,)
        )
        plan = CopyPlan((shard,))
        self.peers = Peers(
            self.settings,
            self.instance_id,
            self.transports,
            local=self.cache.local,
            compatibility=self.compatibility,
            plan=plan,
            max_links=self.max_links,
            max_unfinished=self.max_unfinished,
        )
        self.driver = self.peers.driver
        self.half = WorkerHalf(self.peers, plan, has_draft_kv=self.has_draft_kv)

    @property
    def address(self) -> str:
        return self.peers.address

    @property
    def links(self) -> list[Link]:
        return list(self.peers.links)

    @property
    def is_empty(self) -> bool:
        """True without transfers, and without releases whose last message is being written."""
        driver = self.driver
        with driver.lock:
            return not (len(driver.producer) or len(driver.consumer) or driver._releasing)

    def look(self) -> snapshot.KvSnapshot:
        return snapshot.take(self.peers)

    def step(self, **parts: Any) -> None:
        """Run one engine step."""
        metadata = StepMetadata(**parts)
        self.half.before_step(metadata)
        self.half.after_step(metadata)
        self.collect()

    def collect(self) -> None:
        """Collect the reports at the end of a step."""
        sent, ended, failed = self.half.take_results()
        self.sent += sorted(sent)
        self.ended += sorted(ended)
        self.failed += sorted(failed)
        output = self.half.take_output()
        if output is not None:
            self.arrivals.update(output.arrivals)
            self.failures.update({k: error.message for k, error in output.failures.items()})
            self.codes.update({k: error.code for k, error in output.failures.items()})

    # -- the producer's part

    def expect(self, *transfer_ids: str) -> None:
        self.step(expected=[ProducerExpected(t, f"p-{t}") for t in transfer_ids])

    def compute(self, transfer_id: str, block_ids: list[int], tokens: int) -> None:
        self.step(progress=[ProducerProgress(transfer_id, [block_ids], tokens)])

    def finish(self, transfer_id: str, *, held: bool = True) -> None:
        self.step(ended=[ProducerEnded(transfer_id, TOKENS if held else (), held)])

    def prefill(self, transfer_id: str, block_ids: list[int], tokens: int) -> None:
        self.expect(transfer_id)
        self.compute(transfer_id, block_ids, tokens)
        self.finish(transfer_id)

    # -- the consumer's part

    def start(
        self, source: KvWorker, transfer_id: str, block_ids: list[int], tokens: int, first: int = 0
    ) -> None:
        """Start a load, as the decode engine does when it has reserved blocks."""
        self.step(
            starts=[
                ConsumerStart(
                    transfer_id,
                    f"d-{transfer_id}",
                    (source.address,),
                    source.instance_id,
                    tokens,
                    {0: (first, block_ids)},
                )
            ]
        )

    def cancel(self, *transfer_ids: str) -> None:
        self.step(cancels=list(transfer_ids))

    def refuse(self, source: KvWorker, transfer_id: str) -> None:
        """Decline a transfer, as a decode request does that needs no KV."""
        self.step(declined=[ConsumerDeclined(transfer_id, (source.address,), source.instance_id)])

    def close(self) -> None:
        """Release the worker half and its cache. Idempotent."""
        self.half.close()
        until(lambda: all(link.is_over for link in self.links))
        for transport in self.transports:
            transport.close()
        self.cache.close()


class KvWorkers:
    """A factory of workers of one transport, which closes them at the end. `settings`: fields of
    ConnectorConfig that they have by default."""

    def __init__(self, transport: Callable[[ConnectorConfig], Transport], **settings: Any) -> None:
        self._transport = transport
        self._settings = {**PATIENT, **settings}
        self._names = itertools.count(1)
        self.workers: list[KvWorker] = []

    def worker(self, **parts: Any) -> KvWorker:
        """Make a worker. `parts` are fields of KvWorker and ConnectorConfig."""
        settings = {
            key: parts.pop(key)
            for key in list(parts)
            if key in ConnectorConfig.__struct_fields__ and key != "transports"
        }
        made = ConnectorConfig(**{**self._settings, **settings})
        parts.setdefault("transports", [self._transport(made)])
        parts.setdefault("instance_id", f"instance-{next(self._names)}")
        worker = KvWorker(settings=made, **parts)
        self.workers.append(worker)
        return worker

    def pair(self, **parts: Any) -> tuple[KvWorker, KvWorker]:
        """Return (producer, consumer) with the same settings."""
        return self.worker(**dict(parts)), self.worker(**dict(parts))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def settle(*workers: KvWorker) -> None:
    """Wait until no worker has a transfer."""
    until(lambda: all(worker.is_empty for worker in workers), *workers)
    for worker in workers:
        worker.collect()


def transfer(source: KvWorker, target: KvWorker, name: str = "t") -> None:
    """Transfer the blocks FROM to TO, from the subscription to the end."""
    target.start(source, name, TO, N)
    source.prefill(name, FROM, N)
    settle(source, target)


def check_exact(source: KvWorker, target: KvWorker, before: list[list[bytes]]) -> None:
    """Assert that the subscribed blocks equal the producer's, and that the others are unchanged."""
    want = list(before)
    for s, t in zip(FROM, TO, strict=True):
        want[t] = source.cache.block(s)
    assert target.cache.blocks() == want
