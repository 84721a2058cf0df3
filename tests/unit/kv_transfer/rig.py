"""Worker halves without engines: the test plays the scheduler, the caches hold random bytes."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_transfer.handshake import Identity
from kv_transfer.protocol.plan import Shard
from kv_transfer.settings import KvSettings
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.tcp import TcpTransport
from kv_transfer.vllm.step import (
    Arrival,
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
    Unneeded,
)
from kv_transfer.vllm.worker import WorkerHalf
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import Cache, geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.layout import KvGeometry
    from kv_transfer.tokens import TokenOrder
    from kv_transfer.transport.base import Transport

BLOCK_SIZE = 4
FROM = [5, 6, 2, 20]
TO = [9, 3, 4, 17]
# Times that no test waits for and no pause of the machine outlasts. Who tests one sets it.
PATIENT = {
    "lease_s": 3600.0,
    "receive_timeout_s": 3600.0,
    "cancel_timeout_s": WAIT_S,
    "handshake_timeout_s": WAIT_S,
    "send_timeout_s": WAIT_S,
    "preempt_timeout_s": WAIT_S,
}
N = 14  # tokens: four blocks, the last one partial
TOKENS = (7, 8)  # sampled by the source


def until(condition: Callable[[], object], *workers: Worker) -> None:
    """Lets the workers step until the condition holds; fails the test when it never does."""
    end = time.monotonic() + WAIT_S
    pause = threading.Event()
    while True:
        for worker in workers:
            worker.collect()
        if condition():
            return
        assert time.monotonic() < end, f"{[w.half for w in workers]} did not get there"
        pause.wait(0.002)


def own_threads() -> list[threading.Thread]:
    """The KV plane's threads in this process."""
    return [t for t in threading.enumerate() if t.name.startswith("kv-")]


def open_files() -> int:
    """Descriptors of this process; sockets are among them."""
    return len(list(Path("/proc/self/fd").iterdir()))


@dataclass(eq=False)
class Worker:
    """One worker half with its cache, and all that it has reported. Released by `close`."""

    instance_id: str
    transports: Sequence[Transport]
    shape: KvGeometry = field(default_factory=geometry)
    settings: KvSettings = field(default_factory=KvSettings)
    compatibility: str = "same"
    shared: bool = True
    shard: Shard | None = None
    order: TokenOrder | None = None
    sent: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed = zlib.crc32(self.instance_id.encode())
        self.cache = Cache(self.shape, seed=seed, shared=self.shared, order=self.order)
        local = self.cache.local
        self.half = WorkerHalf(self.settings, self.instance_id, self.transports)
        self.half.register(
            local,
            Identity(self.instance_id, self.compatibility),
            self.shard or Shard(1, self.shape.page_bytes, BLOCK_SIZE),
        )

    def step(self, **parts: Any) -> None:
        """One engine step: what is told before it, and what it computed."""
        metadata = StepMetadata(**parts)
        self.half.before_step(metadata)
        self.half.after_step(metadata)
        self.collect()

    def collect(self) -> None:
        """What the end of a step reports."""
        sent, ended, failed = self.half.take_results()
        self.sent += sorted(sent)
        self.ended += sorted(ended)
        self.failed += sorted(failed)
        output = self.half.take_output()
        if output is not None:
            self.arrivals.update(output.arrivals)
            self.failures.update({k: error.message for k, error in output.failures.items()})
            self.codes.update({k: error.code for k, error in output.failures.items()})

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any transfer."""
        return self.half.links.is_empty

    # -- the source's part

    def expect(self, *transfer_ids: str) -> None:
        """Requests enter the prefill engine."""
        self.step(expected=[SourceExpected(t, f"p-{t}") for t in transfer_ids])

    def compute(self, transfer_id: str, block_ids: list[int], tokens: int) -> None:
        """A step fills blocks up to `tokens`."""
        self.step(progress=[SourceProgress(transfer_id, block_ids, tokens)])

    def finish(self, transfer_id: str, *, held: bool = True) -> None:
        """The prefill request ends."""
        self.step(ended=[SourceEnded(transfer_id, TOKENS if held else (), held)])

    def prefill(self, transfer_id: str, block_ids: list[int], tokens: int) -> None:
        """A whole prefill in one step."""
        self.expect(transfer_id)
        self.compute(transfer_id, block_ids, tokens)
        self.finish(transfer_id)

    # -- the target's part

    def start(
        self, source: Worker | str, transfer_id: str, block_ids: list[int], tokens: int, **rest: Any
    ) -> None:
        """The decode engine has reserved blocks. `rest`: first_block, instance id."""
        address = source if isinstance(source, str) else source.half.address
        instance_id = rest.pop("instance_id", "" if isinstance(source, str) else source.instance_id)
        first = rest.pop("first_block", 0)
        self.step(
            starts=[
                TargetStart(
                    transfer_id,
                    f"d-{transfer_id}",
                    (address,),
                    instance_id,
                    first,
                    tokens,
                    block_ids,
                )
            ],
            **rest,
        )

    def cancel(self, *transfer_ids: str) -> None:
        """The decode requests are wanted no longer."""
        self.step(cancels=list(transfer_ids))

    def refuse(self, source: Worker, transfer_id: str) -> None:
        """The decode request needs nothing from its source."""
        self.step(unneeded=[Unneeded(transfer_id, (source.half.address,), source.instance_id)])

    # -- time

    def give_up(self) -> None:
        """As a target: whatever makes no progress has made none for too long."""
        self.half.links.targets.receive_timeout_s = 0.05
        self.half.links.targets.cancel_timeout_s = 0.05

    def end_lease(self, transfer_id: str) -> None:
        """As a source: the blocks were held for long enough."""
        with self.half.links.lock:
            self.half.links.sources._transfers[transfer_id].lease_end = 0.0

    def set_times(self, **times: float) -> None:
        """For links that are made from now on."""
        self.half.links._settings = replace(self.half.links._settings, **times)  # type: ignore[arg-type]

    def close(self) -> None:
        """Idempotent. A thread of a link may still read the cache for a moment."""
        self.half.close()
        until(lambda: all(link.is_over for link in self.half.links._all))
        for transport in self.transports:
            transport.close()
        self.cache.close()


class Rig:
    """Makes workers of one transport and takes them down again."""

    def __init__(self, transport: Callable[[], Transport]) -> None:
        self._transport = transport
        self._names = itertools.count(1)
        self.workers: list[Worker] = []

    def worker(self, **parts: Any) -> Worker:
        """`parts` are Worker's and KvSettings' fields."""
        settings = {
            key: parts.pop(key)
            for key in list(parts)
            if key in KvSettings.__dataclass_fields__ and key != "transports"
        }
        parts.setdefault("transports", [self._transport()])
        parts.setdefault("instance_id", f"instance-{next(self._names)}")
        worker = Worker(settings=KvSettings(**{**PATIENT, **settings}), **parts)
        self.workers.append(worker)
        return worker

    def pair(self, **parts: Any) -> tuple[Worker, Worker]:
        """(source, target) with the same settings."""
        return self.worker(**dict(parts)), self.worker(**dict(parts))

    def close(self) -> None:
        """Every worker, and the proof that nothing of them stays."""
        for worker in self.workers:
            worker.close()
        end = time.monotonic() + WAIT_S
        while own_threads():
            assert time.monotonic() < end, own_threads()


def by_name(name: str, loopback: Transport) -> Callable[[], Transport]:
    """A maker of transports; loopback is one instance for both ends."""
    made: dict[str, Callable[[], Transport]] = {
        "loopback": lambda: loopback,
        "shm": ShmTransport,
        "tcp": TcpTransport,
    }
    return made[name]


def settle(source: Worker, target: Worker) -> None:
    """Until neither worker knows of any transfer."""
    until(lambda: source.is_empty and target.is_empty, source, target)
    for worker in (source, target):  # what a thread has reported since the last look
        worker.collect()


def check_exact(source: Worker, target: Worker, before: list[list[bytes]]) -> None:
    """The granted blocks hold the source's, the others what they held."""
    want = list(before)
    for s, t in zip(FROM, TO, strict=True):
        want[t] = source.cache.block(s)
    assert target.cache.blocks() == want
