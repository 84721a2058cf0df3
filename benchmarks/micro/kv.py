"""Speed of KV transfers between two processes over each transport, compared with memcpy.

tls is encrypted tcp (worker.kv.tls). cuda_ipc and nccl move KV between GPUs: the second process has
the machine's last GPU, or the only one.

Both processes run the worker half of the connector, as vLLM's worker does. Scattered blocks are
copied to scattered blocks, different ones in every round, in caches larger than the CPU's. The
first transfer of each case is checked byte by byte. memcpy gathers the same blocks within one
process (numpy.take). It also uses shared memory, because private memory has larger pages, which are
copied faster. Between GPUs, memcpy is one copy of the same number of bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import multiprocessing
import os
import random
import select
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks.errors import BenchError, MeasurementFailed
from benchmarks.stats import WARMUP, alternate, compare
from kv_transfer.cache.geometry import KvGeometry, KvGroup
from kv_transfer.cache.host_memory import KvRegion, SharedMemory
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.peers import Peers
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import ON_GPU, read_extra_config
from kv_transfer.transport import make
from kv_transfer.vllm.step import (
    ConsumerStart,
    ProducerEnded,
    ProducerExpected,
    ProducerProgress,
    StepMetadata,
)
from kv_transfer.vllm.worker_half import WorkerHalf
from pdserve.errors import ConfigError
from pdserve.process.gpus import gpu_environment, visible_gpus

if TYPE_CHECKING:
    import argparse

    from numpy.typing import NDArray

    from benchmarks.micro.gpu_cache import BusyEngine, GpuCache
    from benchmarks.progress import Progress

# Transports.
WAYS: Final = ("shm", "nixl", "tcp", "tls")
MEMCPY: Final = "memcpy"
PRODUCER, CONSUMER = "producer", "consumer"
ARRIVAL_S: Final = 60.0
SETTLE_S: Final = 0.01  # until this process has submitted the work and is idle


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", default="256,4096", metavar="N,...", help="a transfer")
    parser.add_argument("--block-kib", default="16,64", metavar="N,...", help="size of a block")
    parser.add_argument("--cache-mib", type=int, default=512, help="of each process (512)")
    parser.add_argument("--chunk-mib", type=int, default=16, help="worker.kv.chunk_bytes (16)")
    parser.add_argument("--only", default=",".join(WAYS), metavar="WAY,...", help="transports")
    parser.add_argument("--layout", default="BLHNC", metavar="NAME", help="vLLM's, on GPUs (BLHNC)")
    parser.add_argument("--busy", choices=(PRODUCER, CONSUMER), help="engine that runs beside")


class _Case(NamedTuple):
    """`layout`: of GPU caches, "" in host memory. `busy`: the role whose GPU is busy, or ""."""

    blocks: int
    block_bytes: int
    num_blocks: int  # of each cache
    layout: str
    busy: str
    chunk_bytes: int
    pki: str  # folder with a certificate and its key, "" if no link is encrypted


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure each case over all transports in turn. Return rows and notes. Raises BenchError."""
    ways = [MEMCPY, *args.only.split(",")]
    on_gpu = {way in ON_GPU for way in ways[1:] if way != "nixl"} or {False}  # nixl: either
    if len(on_gpu) > 1 or (args.busy and on_gpu != {True}):
        raise BenchError("--only: transports between GPUs, which --busy needs, are measured apart")
    layout = args.layout if on_gpu == {True} else ""
    rows: list[dict[str, Any]] = []
    for block_bytes in (int(x) << 10 for x in args.block_kib.split(",")):
        for blocks in map(int, args.blocks.split(",")):
            progress.step(f"{blocks} blocks of {block_bytes >> 10} KiB")
            room = max(blocks * 5 // 4, (args.cache_mib << 20) // block_bytes)
            with tempfile.TemporaryDirectory() as folder:
                pki = _certificate(folder) if "tls" in ways else ""
                chunk_bytes = args.chunk_mib << 20
                case = _Case(blocks, block_bytes, room, layout, args.busy or "", chunk_bytes, pki)
                seconds = await _measure(case, ways, args.rounds)
            rates = [{n: blocks * block_bytes / s / 1e9 for n, s in x.items()} for x in seconds]
            to_tcp = compare(rates, "tcp") if {"tcp", "tls"} <= {*ways} else {}
            rows += [
                {
                    "transport": way,
                    "blocks": blocks,
                    "block_bytes": block_bytes,
                    **({"layout": layout, "busy": args.busy or "none"} if layout else {}),
                    "gb_per_s": rate,
                    "ratio_to_memcpy": ratio or 1.0,
                    **({"ratio_to_tcp": to_tcp[way][1] or 1.0} if to_tcp else {}),
                }
                for way, (rate, ratio) in compare(rates, MEMCPY).items()
            ]
    return rows, ["ratios are to the same blocks in the same round"]


def _certificate(folder: str) -> str:
    """Write a worker's certificate, which is its own CA, and return the folder."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
        " -subj /CN=bench -addext subjectAltName=URI:urn:pdserve:role:worker"
        " -keyout key.pem -out cert.pem"
    )
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"tls needs a certificate from openssl: {error}") from error
    return folder


async def _measure(case: _Case, ways: list[str], rounds: int) -> list[dict[str, float]]:
    loop, trips = asyncio.get_running_loop(), itertools.count(1)
    spawn = multiprocessing.get_context("spawn")
    sides = {x: ProcessPoolExecutor(1, spawn) for x in (PRODUCER, CONSUMER)}

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
            raise MeasurementFailed(f"{way}: {wrong} of {case.blocks} blocks are wrong")
        return float(seconds)

    try:
        for role, side in sides.items():
            await loop.run_in_executor(side, _begin, role, case)
        for way in (x for x in ways if x != MEMCPY):
            address = await call(PRODUCER, "open", way, None)
            await call(CONSUMER, "open", way, address)
        if case.busy:
            await call(case.busy, "keep_busy")
        return [x async for x in alternate(ways, rounds, measure)]
    except BrokenProcessPool:
        raise MeasurementFailed("the producer or the consumer ended") from None
    finally:
        for role, side in sides.items():
            with suppress(BrokenProcessPool, BenchError):  # it may not have begun
                await call(role, "close")
            side.shutdown()


_side: _Side | None = None  # of this process


def _begin(role: str, case: _Case) -> None:
    """Create this process's side. Raises BenchError."""
    global _side
    _side = _Side(role, case)


def _call(method: str, *arguments: object) -> Any:
    try:
        return getattr(_side, method)(*arguments)
    except (BenchError, ConfigError) as error:
        raise BenchError(str(error)) from None
    except Exception as error:  # noqa: BLE001 - the parent reports it
        raise MeasurementFailed(f"{method}: {type(error).__name__}: {error}") from None


def _shared(size: int) -> tuple[SharedMemory, NDArray[np.uint64]]:
    memory = SharedMemory("pdserve-bench-kv")
    memory.grow(size)
    words = np.frombuffer(mmap.mmap(memory.fd, size), np.uint64)
    words.fill(0)  # touch its pages, as in a cache that has been full
    return memory, words


def _has_results(half: WorkerHalf) -> bool:
    """Wait until a transfer has ended. Return False if none does in ARRIVAL_S."""
    return bool(select.select([half.driver.wakeup], [], [], ARRIVAL_S)[0])


class _HostCache:
    """A cache in shared memory."""

    def __init__(self, case: _Case, *, is_counted: bool) -> None:
        size = case.num_blocks * case.block_bytes
        memory, words = _shared(size)
        words[:] = np.arange(len(words)) if is_counted else np.iinfo(np.uint64).max
        self._blocks = words.reshape(case.num_blocks, -1)
        if not is_counted:  # the producer's content, for memcpy and for the check
            source = _shared(size)[1]
            source[:] = np.arange(len(source))
            self._source = source.reshape(case.num_blocks, -1)
        page = case.block_bytes
        self.region = KvRegion(
            int(words.ctypes.data), size, KvGeometry(1, case.num_blocks, page, size, page)
        )
        self.local = LocalKv({0: self.region}, memory)

    def memcpy(self, ids: list[int], first: int) -> float:
        """Copy the source's blocks to the blocks from `first` on, and return the seconds."""
        rows = np.array(ids)
        begun = time.perf_counter()
        # In all other modes, numpy copies to a buffer first.
        out = self._blocks[first : first + len(ids)]
        np.take(self._source, rows, axis=0, out=out, mode="clip")
        return time.perf_counter() - begun

    def wrong_blocks(self, source_ids: list[int], own_ids: list[int]) -> int:
        return int((self._blocks[own_ids] != self._source[source_ids]).any(axis=1).sum())


class _Side:
    """The producer or consumer process: a cache, and a worker half for each transport."""

    def __init__(self, role: str, case: _Case) -> None:
        self._role, self._case = role, case
        self._cache: _HostCache | GpuCache
        self._engine: BusyEngine | None = None
        if case.layout:
            self._cache = _on_gpu(role, case)
        else:
            self._cache = _HostCache(case, is_counted=role == PRODUCER)
        self._halves: dict[str, WorkerHalf] = {}
        self._peers: dict[str, Any] = {}

    def open(self, way: str, peer: Any) -> Any:
        """Set up a transport and return our address. `peer` is the producer's address, or None in
        the producer."""
        geometry = self._cache.region.geometry
        extra: dict[str, Any] = {"transports": (way,)}
        if way == "tls":
            cert, key = (f"{self._case.pki}/{name}.pem" for name in ("cert", "key"))
            files = {"tls_cert_file": cert, "tls_key_file": key, "tls_ca_file": cert}
            extra = {"transports": ("tcp",), "tls": True, **files}
        settings = read_extra_config({**extra, "chunk_bytes": self._case.chunk_bytes})
        # Blocks have one token here, because their content does not matter.
        plan = CopyPlan((Shard(1, geometry.page_bytes, KvGroup(0, 1), (geometry.num_layers,)),))
        peers = Peers(
            settings,
            self._role,
            make(settings, on_gpu=bool(self._case.layout)),
            local=self._cache.local,
            compatibility="bench",
            plan=plan,
        )
        self._halves[way] = WorkerHalf(peers, plan)
        self._peers[way] = peer
        return peers.address

    def keep_busy(self) -> None:
        """Keep the GPU busy until `close`."""
        from benchmarks.micro.gpu_cache import BusyEngine

        self._engine = BusyEngine()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        for half in self._halves.values():
            half.close()

    def _ids(self, trip: int, role: str) -> list[int]:
        """Return random block ids, different ones for every trip."""
        blocks = range(self._case.num_blocks)
        return random.Random(f"{role} {trip}").sample(blocks, self._case.blocks)

    def offer(self, way: str, trip: int) -> None:
        """Hold blocks for the consumer, as after prefill. Not measured."""
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
        if used != ("tcp" if way == "tls" else way):
            raise KvTransferError(f"{used} was used instead of {way}")
        return seconds

    def copy(self, trip: int) -> float:
        """Copy the same number of bytes with memcpy and return the duration in seconds."""
        blocks = self._case.blocks
        if isinstance(self._cache, _HostCache):
            first = min(self._ids(trip, CONSUMER)[0], self._case.num_blocks - blocks)
            return self._cache.memcpy(self._ids(trip, PRODUCER), first)
        return self._cache.memcpy(blocks * self._case.block_bytes, 0)

    def wrong_blocks(self, trip: int) -> int:
        """Return the number of received blocks that differ from the producer's."""
        return self._cache.wrong_blocks(*(self._ids(trip, role) for role in (PRODUCER, CONSUMER)))


def _on_gpu(role: str, case: _Case) -> GpuCache:
    """Return a cache on the first GPU for the producer, and on the last for the consumer. Raises
    BenchError if there is no GPU."""
    gpus = sorted(visible_gpus())
    # Each process sees only its own GPU, as workers do.
    os.environ.update(gpu_environment(gpus[:1] if role == PRODUCER else gpus[-1:]))
    if len(gpus) < 2:  # for NCCL and our transport: both processes may use one GPU
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    import torch

    from benchmarks.micro.gpu_cache import GpuCache, missing_gpu

    if reason := missing_gpu():
        raise BenchError(reason)
    device = 0 if gpus or role == PRODUCER else torch.cuda.device_count() - 1  # without NVML
    sizes = case.num_blocks, case.block_bytes
    return GpuCache(*sizes, case.layout, device, is_counted=role == PRODUCER)
