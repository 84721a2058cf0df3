"""Speed of KV transfers between two processes over each transport, compared with memcpy.

Both processes run the worker half of the connector, as vLLM's worker does. Scattered blocks are
copied to scattered blocks, different ones in every round, in caches larger than the CPU's. The
first transfer of each case is checked byte by byte. memcpy gathers the same blocks within one
process (numpy.take). It also uses shared memory, because private memory has larger pages, which are
copied faster.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import multiprocessing
import random
import select
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks.errors import BenchError
from benchmarks.stats import WARMUP, alternate, compare
from kv_transfer.cache.geometry import KvGeometry, KvGroup
from kv_transfer.cache.host_memory import KvRegion, SharedMemory, prefault
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.peers import Peers
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import read_extra_config
from kv_transfer.transport import make
from kv_transfer.vllm.step import (
    ConsumerStart,
    ProducerEnded,
    ProducerExpected,
    ProducerProgress,
    StepMetadata,
)
from kv_transfer.vllm.worker_half import WorkerHalf

if TYPE_CHECKING:
    import argparse

    from numpy.typing import NDArray

    from benchmarks.progress import Progress

# Transports.
WAYS: Final = ("shm", "tcp")
MEMCPY: Final = "memcpy"
PRODUCER, CONSUMER = "producer", "consumer"
ARRIVAL_S: Final = 60.0
SETTLE_S: Final = 0.01  # until this process has handed over the work and is idle


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", default="256,4096", metavar="N,...", help="a transfer")
    parser.add_argument("--block-kib", default="16,64", metavar="N,...", help="size of a block")
    parser.add_argument("--cache-mib", type=int, default=512, help="of each process (512)")
    parser.add_argument("--only", default=",".join(WAYS), metavar="WAY,...", help="transports")


class _Case(NamedTuple):
    blocks: int
    block_bytes: int
    num_blocks: int  # of each cache


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure each case over all transports in turn. Return rows and notes. Raises BenchError."""
    ways = [MEMCPY, *args.only.split(",")]
    rows: list[dict[str, Any]] = []
    for block_bytes in (int(x) << 10 for x in args.block_kib.split(",")):
        for blocks in map(int, args.blocks.split(",")):
            progress.step(f"{blocks} blocks of {block_bytes >> 10} KiB")
            room = max(blocks * 5 // 4, (args.cache_mib << 20) // block_bytes)
            case = _Case(blocks, block_bytes, room)
            seconds = await _measure(case, ways, args.rounds)
            rates = [{n: blocks * block_bytes / s / 1e9 for n, s in x.items()} for x in seconds]
            rows += [
                {
                    "transport": way,
                    "blocks": blocks,
                    "block_bytes": block_bytes,
                    "gb_per_s": rate,
                    "ratio_to_memcpy": ratio or 1.0,
                }
                for way, (rate, ratio) in compare(rates, MEMCPY).items()
            ]
    return rows, ["the ratio is to memcpy of the same blocks in the same round"]


async def _measure(case: _Case, ways: list[str], rounds: int) -> list[dict[str, float]]:
    loop, trips = asyncio.get_running_loop(), itertools.count(1)
    spawn = multiprocessing.get_context("spawn")
    sides = {x: ProcessPoolExecutor(1, spawn, _begin, (x, case)) for x in (PRODUCER, CONSUMER)}

    def call(role: str, method: str, *arguments: object) -> asyncio.Future[Any]:
        return loop.run_in_executor(sides[role], _call, method, *arguments)

    async def measure(way: str, number: int) -> float:
        trip = next(trips)
        if way == MEMCPY:
            return float(await call(CONSUMER, "copy", trip))
        await call(PRODUCER, "offer", way, trip)
        acknowledged = call(PRODUCER, "wait_for_acknowledgement", way, trip)
        await asyncio.sleep(SETTLE_S)
        seconds, _ = await asyncio.gather(call(CONSUMER, "receive", way, trip), acknowledged)
        wrong = await call(CONSUMER, "wrong_blocks", trip) if number == WARMUP else 0
        if wrong:
            raise BenchError(f"{way}: {wrong} of {case.blocks} blocks are wrong")
        return float(seconds)

    try:
        for way in (x for x in ways if x != MEMCPY):
            address = await call(PRODUCER, "open", way, None)
            await call(CONSUMER, "open", way, address)
        return [x async for x in alternate(ways, rounds, measure)]
    except BrokenProcessPool:
        raise BenchError("the producer or the consumer ended") from None
    finally:
        for role, side in sides.items():
            with suppress(BrokenProcessPool):
                await call(role, "close")
            side.shutdown()


_side: _Side  # of this process


def _begin(role: str, case: _Case) -> None:
    global _side
    _side = _Side(role, case)


def _call(method: str, *arguments: object) -> Any:
    try:
        return getattr(_side, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        raise BenchError(f"{method}: {type(error).__name__}: {error}") from None


def _shared(size: int) -> tuple[SharedMemory, NDArray[np.uint64]]:
    memory = SharedMemory("pdserve-bench-kv")
    memory.grow(size)
    words = np.frombuffer(mmap.mmap(memory.fd, size), np.uint64)
    prefault(int(words.ctypes.data), size)
    return memory, words


def _has_results(half: WorkerHalf) -> bool:
    """Wait until a transfer has ended. Return False if none does in ARRIVAL_S."""
    return bool(select.select([half.driver.wakeup], [], [], ARRIVAL_S)[0])


class _Side:
    """The producer or consumer process: a cache in shared memory, and a worker half for each
    transport."""

    def __init__(self, role: str, case: _Case) -> None:
        self._role, self._case = role, case
        size = case.num_blocks * case.block_bytes
        self._memory, words = _shared(size)
        self._address = int(words.ctypes.data)
        words[:] = np.arange(len(words)) if role == PRODUCER else np.iinfo(np.uint64).max
        self._blocks = words.reshape(case.num_blocks, -1)
        if role == CONSUMER:  # a copy of the producer's content, for memcpy and for the check
            words = _shared(size)[1]
            words[:] = np.arange(len(words))
            self._source = words.reshape(case.num_blocks, -1)
        self._halves: dict[str, WorkerHalf] = {}
        self._peers: dict[str, Any] = {}

    def open(self, way: str, peer: Any) -> Any:
        """Set up a transport and return our address. `peer` is the producer's address, or None in
        the producer."""
        page = self._case.block_bytes
        geometry = KvGeometry(1, self._case.num_blocks, page, self._memory.size, page)
        settings = read_extra_config({"transports": (way,)})
        region = KvRegion(self._address, self._memory.size, geometry)
        # Blocks have one token here, because their content does not matter.
        plan = CopyPlan((Shard(1, page, KvGroup(0, 1), (1,)),))
        peers = Peers(
            settings,
            self._role,
            make(settings),
            local=LocalKv({0: region}, self._memory),
            compatibility="bench",
            plan=plan,
        )
        self._halves[way] = WorkerHalf(peers, plan)
        self._peers[way] = peer
        return peers.address

    def close(self) -> None:
        for half in self._halves.values():
            half.close()

    def _ids(self, trip: int, role: str) -> list[int]:
        """Return random block ids, different ones for every trip."""
        blocks = range(self._case.num_blocks)
        return random.Random(f"{role} {trip}").sample(blocks, self._case.blocks)

    def offer(self, way: str, trip: int) -> None:
        """Hold blocks for the consumer, as after a prefill. Not measured."""
        half, name, ids = self._halves[way], f"t{trip}", self._ids(trip, PRODUCER)
        half.before_step(StepMetadata(expected=[ProducerExpected(name, name)]))
        half.after_step(StepMetadata(progress=[ProducerProgress(name, [ids], len(ids))]))
        half.before_step(StepMetadata(ended=[ProducerEnded(name, (1,), held=True)]))

    def wait_for_acknowledgement(self, way: str, trip: int) -> None:
        half = self._halves[way]
        while f"t{trip}" not in half.take_results()[0]:
            if not _has_results(half):
                raise KvTransferError("no acknowledgement")

    def receive(self, way: str, trip: int) -> float:
        """Run a transfer and return its duration in seconds."""
        half, name, ids = self._halves[way], f"t{trip}", self._ids(trip, CONSUMER)
        start = ConsumerStart(name, name, (self._peers[way],), PRODUCER, len(ids), {0: (0, ids)})
        begun = time.perf_counter()
        half.before_step(StepMetadata(starts=[start]))
        arrived = _has_results(half)
        seconds = time.perf_counter() - begun
        half.take_results()
        output = half.take_output()
        if not arrived or output is None or name not in output.arrivals:
            raise KvTransferError(f"{name} did not arrive: {output and output.failures}")
        used = output.arrivals[name].report.transport
        if used != way:
            raise KvTransferError(f"{used} was used instead of {way}")
        return seconds

    def copy(self, trip: int) -> float:
        """Copy the blocks with memcpy and return the duration in seconds."""
        ids, blocks = np.array(self._ids(trip, PRODUCER)), self._case.blocks
        first = min(self._ids(trip, CONSUMER)[0], self._case.num_blocks - blocks)
        begun = time.perf_counter()
        # In all other modes, numpy copies to a buffer first.
        np.take(self._source, ids, axis=0, out=self._blocks[first : first + blocks], mode="clip")
        return time.perf_counter() - begun

    def wrong_blocks(self, trip: int) -> int:
        """Return the number of received blocks that differ from the producer's."""
        there, here = (self._ids(trip, role) for role in (PRODUCER, CONSUMER))
        return int((self._blocks[here] != self._source[there]).any(axis=1).sum())
