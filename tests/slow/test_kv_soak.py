"""Hundreds of KV transfers between processes that are killed, stopped and restarted, while requests
are cancelled. Each completed transfer is exact to the byte, and nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transfer.settings import ConnectorConfig
from kv_transfer.vllm.step import ConsumerStart, ProducerEnded, ProducerExpected, ProducerProgress
from tests.support.kv_caches import geometry
from tests.support.kv_pair import BLOCK_SIZE, TRANSPORTS, KvWorkers
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tests.support.kv_pair import KvWorker

TRANSFERS, MAX_OPEN, KILL_EVERY, STOP_EVERY = 600, 24, 60, 45
SHAPE = geometry(layers=3, blocks=400, page=512)
TIMES = {"hold_s": 3.0, "receive_timeout_s": 3.0, "send_timeout_s": 1.0, "chunk_bytes": 3 * 1536}
FATES = {"complete": 12, "cancel": 2, "abort": 1, "unasked": 1, "unknown": 1, "preempt": 2}
_Context = multiprocessing.get_context("spawn")


def content(transfer_id: str, block: int) -> list[bytes]:
    dice = random.Random(f"{transfer_id} {block}")
    return [dice.randbytes(SHAPE.page_bytes) for _ in range(SHAPE.num_layers)]


def run_worker(pipe: Connection, name: str, transports: tuple[str, ...]) -> None:
    """Run a worker process: execute commands, and report transfers that ended."""
    kv_workers = KvWorkers(TRANSPORTS["tcp"])
    made = [TRANSPORTS[each](ConnectorConfig()) for each in transports]
    worker = kv_workers.worker(instance_id=name, transports=made, shape=SHAPE, **TIMES)
    pipe.send(worker.address)
    blocks: dict[str, list[int]] = {}
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            while pipe.poll(0.001):
                what, arguments = pipe.recv()
                if what == "close":
                    kv_workers.close()
                    pipe.send("closed")
                    return
                if what == "fill":
                    for n, block in enumerate(arguments[1]):
                        worker.cache.fill(block, content(arguments[0], n))
                elif what == "empty":
                    pipe.send(("empty", worker.is_empty))
                else:
                    for start in arguments.get("starts", ()):
                        blocks[start.request_id] = start.blocks[0][1]
                    worker.step(**arguments)
            worker.step()
            report(pipe, worker, blocks)


def report(pipe: Connection, worker: KvWorker, blocks: dict[str, list[int]]) -> None:
    for request_id in worker.sent:
        pipe.send(("sent", request_id))
    for request_id in worker.ended:
        ids = blocks.pop(request_id)
        is_right = all(
            worker.cache.block(block) == content(request_id.removeprefix("d-"), n)
            for n, block in enumerate(ids)
        )
        outcome = "failed" if request_id in worker.failed else "right" if is_right else "wrong"
        pipe.send((outcome, request_id))
    worker.sent.clear()
    worker.ended.clear()
    worker.failed.clear()


@dataclass
class Peer:
    """A worker process, and the free blocks of its cache."""

    name: str
    transports: tuple[str, ...]
    starts: int = 0
    address: str = ""
    free: list[int] = field(default_factory=list)
    used: dict[str, list[int]] = field(default_factory=dict)
    stopped_until: float = 0.0

    @property
    def instance_id(self) -> str:
        return f"{self.name}-{self.starts}"

    def start(self) -> None:
        self.starts += 1
        self.pipe, theirs = _Context.Pipe()
        arguments = (theirs, self.instance_id, self.transports)
        self.process = _Context.Process(target=run_worker, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.address = self.pipe.recv()
        self.free, self.used = list(range(SHAPE.num_blocks)), {}

    def take(self, request_id: str, count: int) -> list[int]:
        blocks, self.free = self.free[:count], self.free[count:]
        self.used[request_id] = blocks
        return blocks

    def give_back(self, request_id: str) -> None:
        self.free += self.used.pop(request_id, [])

    def tell(self, what: str, arguments: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((what, arguments))


class Driver:
    """The router and the schedulers of both engines."""

    def __init__(self) -> None:
        both = ("shm", "tcp")
        self.prefills = [Peer("p0", both), Peer("p1", ("tcp",))]
        self.decodes = [Peer("d0", both), Peer("d1", both)]
        self.peers = self.prefills + self.decodes
        self.dice = random.Random(20261122)
        self.outcomes: dict[str, int] = {"right": 0, "wrong": 0, "failed": 0, "sent": 0}
        self.numbers = itertools.count()
        for peer in self.peers:
            peer.start()

    def launch(self) -> None:
        tid, dice = f"t{next(self.numbers)}", self.dice
        (fate,) = dice.choices([*FATES], [*FATES.values()])
        source, target = dice.choice(self.prefills), dice.choice(self.decodes)
        count = dice.randint(1, 12)
        tokens = count * BLOCK_SIZE - dice.randrange(BLOCK_SIZE)
        if len(source.free) < 2 * count or len(target.free) < count:
            return
        if fate != "unasked":
            ids = target.take(f"d-{tid}", count)
            address, instance_id = (source.address,), source.instance_id
            start = ConsumerStart(tid, f"d-{tid}", address, instance_id, tokens, {0: (0, ids)})
            target.tell("step", {"starts": [start]})
        if fate != "unknown":
            self.prefill(source, tid, count, tokens, fate)
        if fate == "cancel":
            target.tell("step", {"cancels": [tid]})

    def prefill(self, source: Peer, tid: str, count: int, tokens: int, fate: str) -> None:
        ids = source.take(f"p-{tid}", count)
        source.tell("step", {"expected": [ProducerExpected(tid, f"p-{tid}")]})
        source.tell("fill", (tid, ids))
        half = tokens // 2
        source.tell(
            "step", {"progress": [ProducerProgress(tid, [ids[: -(-half // BLOCK_SIZE)]], half)]}
        )
        if fate == "preempt":
            source.tell("step", {"preempted": [tid]})
            source.tell("fill", ("others", ids))
            source.give_back(f"p-{tid}")
            ids = source.take(f"p-{tid}", count)
            source.tell("fill", (tid, ids))
        held = fate != "abort"
        if held:
            source.tell("step", {"progress": [ProducerProgress(tid, [ids], tokens)]})
        ended = ProducerEnded(tid, (1,) if held else (), held, f"p-{tid}")
        source.tell("step", {"ended": [ended]})
        if not held:
            source.give_back(f"p-{tid}")

    def collect(self) -> None:
        for peer in self.peers:
            if peer.stopped_until and time.monotonic() >= peer.stopped_until:
                os.kill(peer.process.pid or 0, signal.SIGCONT)
                peer.stopped_until = 0.0
            with contextlib.suppress(EOFError, ConnectionResetError):
                while peer.pipe.poll():
                    what, request_id = peer.pipe.recv()
                    self.outcomes[what] += 1
                    peer.give_back(request_id)
        time.sleep(0.002)

    def kill(self, peer: Peer) -> None:
        peer.process.kill()
        peer.process.join()
        peer.pipe.close()
        peer.stopped_until = 0.0
        peer.start()

    def stop(self, peer: Peer) -> None:
        os.kill(peer.process.pid or 0, signal.SIGSTOP)
        peer.stopped_until = time.monotonic() + self.dice.choice([0.1, 1.0, 4.0])

    def is_quiet(self) -> bool:
        self.collect()
        return not any(peer.used or peer.stopped_until for peer in self.peers)

    def close(self) -> None:
        for peer in self.peers:
            peer.tell("close", None)
        for peer in self.peers:
            peer.process.join(WAIT_S)
            peer.process.kill()
            peer.pipe.close()


def test_no_storm_leaves_a_block_pinned_or_a_byte_wrong() -> None:
    driver = Driver()
    try:
        for n in range(1, TRANSFERS + 1):
            driver.launch()
            if n % KILL_EVERY == 0:
                driver.kill(driver.peers[n // KILL_EVERY % 4])
            if n % STOP_EVERY == 0:
                driver.stop(driver.dice.choice(driver.peers))
            driver.collect()
            while sum(len(peer.used) for peer in driver.peers) > MAX_OPEN:
                driver.collect()
        end = time.monotonic() + WAIT_S
        while not driver.is_quiet():
            assert time.monotonic() < end, [(p.name, p.used) for p in driver.peers]
        for peer in driver.peers:
            answer = False
            while not answer:
                assert time.monotonic() < end, f"{peer.name} still knows transfers"
                peer.tell("empty", None)
                what, answer = peer.pipe.recv()
                assert what == "empty"
    finally:
        driver.close()
    assert driver.outcomes["wrong"] == 0
    assert driver.outcomes["right"] > TRANSFERS / 3, driver.outcomes
