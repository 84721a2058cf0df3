"""KV over NIXL between processes: a producer that is killed, and real engines, whose answers are
one engine's, token for token."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from kv_transfer.transport.nixl import NixlTransport
from pdserve.client import Client
from tests.support.engine_pair import joined, params, prompt
from tests.support.kv_pair import FROM, PATIENT, TO, KvWorker, KvWorkers, N, check_exact, until
from tests.support.pdserve_up import UpProcess
from tests.support.served_up import ServedUp
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
BLOCK = 32
ENGINE_ARGS = {
    "dtype": "float32",  # where no tie can flip
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 256,
}


def serve(control: Connection) -> None:
    """A producer process. It holds transfers named by the messages, until it is killed."""
    config = ConnectorConfig(**PATIENT)  # type: ignore[arg-type]
    worker = KvWorker("producer", [NixlTransport(config)], settings=config)
    control.send((worker.address, worker.cache.blocks()))
    while True:
        worker.prefill(control.recv(), FROM, N)
        control.send("held")


class Producer:
    """A producer in another process, as the target's `start` and `check_exact` see it."""

    instance_id = "producer"

    def __init__(self) -> None:
        self._control, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=serve, args=(there,), daemon=True)
        self.process.start()

    def begin(self) -> None:
        assert self._control.poll(WAIT_S)
        self.address, blocks = self._control.recv()
        self.cache = SimpleNamespace(block=lambda n: blocks[n])

    def prefill(self, name: str) -> None:
        self._control.send(name)
        assert self._control.poll(WAIT_S)
        self._control.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self._control.close()


async def test_a_killed_producer_fails_its_transfers_only_and_returns() -> None:
    workers = KvWorkers(NixlTransport)
    target = workers.worker()
    sources = [Producer(), Producer()]  # both import torch now
    for round_, source in enumerate(sources):
        before = target.cache.blocks()
        source.begin()
        try:
            for name in (f"a{round_}", f"b{round_}"):
                target.start(source, name, TO, N)  # type: ignore[arg-type]
                source.prefill(name)
                until(lambda name=name: f"d-{name}" in target.ended, target)  # type: ignore[misc]
                check_exact(source, target, before)  # type: ignore[arg-type]
            target.start(source, f"c{round_}", TO, N)  # type: ignore[arg-type]
        finally:
            source.kill()
        until(lambda n=round_: f"d-c{n}" in target.ended, target)  # type: ignore[misc]
    assert target.failed == ["d-c0", "d-c1"]
    workers.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServedUp]:
    options = ["--http-port", "0", "--grpc-port", "0", "--model", str(tiny_model)]
    for name, value in ENGINE_ARGS.items():
        options += ["--set", f"worker.engine_args.{name}={value}"]
    options += ["--set", "router.policy=least_loaded", "--kv-transport", "nixl"]
    up = UpProcess(tmp_path_factory.mktemp("up"), *options)
    try:
        yield await asyncio.to_thread(ServedUp, up)
        up.send(signal.SIGINT)
        assert await asyncio.to_thread(up.wait) == 0, up.output
        assert up.survivors() == []
    finally:
        up.close()


@pytest.mark.parametrize("length", [33, 700])
async def test_an_answer_is_exact(
    running: ServedUp, aggregated: EngineProcess, length: int
) -> None:
    ids, sampling = prompt(length, 200), params(ignore_eos=True)
    async with Client(running.grpc) as client:
        deltas = [delta async for delta in client.generate(ids, sampling)]
    assert joined(*deltas) == joined(await aggregated.run(ids, sampling))
    receipt = deltas[-1].receipt
    assert receipt is not None
    assert (receipt.transport, receipt.transfer_blocks) == ("nixl", -(-length // BLOCK))
    assert receipt.fallbacks == ()
    await running.until_empty()


async def test_an_answer_outlives_its_decode_worker(
    running: ServedUp, aggregated: EngineProcess
) -> None:
    """Last in this file. The answer continues exactly on the prefill worker, which served reads."""
    ids, sampling = prompt(100, 270), params(100, temperature=0.9, seed=5, ignore_eos=True)
    decode = next(x for x in running.ready["workers"] if x["role"] == "decode")
    # Stopped, it makes no token before it is killed, however fast the machine is.
    os.kill(decode["pid"], signal.SIGSTOP)
    deltas = []
    async with Client(running.grpc) as client:
        async for delta in client.generate(ids, sampling):
            if not deltas:
                os.kill(decode["pid"], signal.SIGKILL)
            deltas.append(delta)
    assert joined(*deltas) == joined(await aggregated.run(ids, sampling))
    receipt = deltas[-1].receipt
    assert receipt is not None
    assert receipt.fallbacks
    running.ready["workers"].remove(decode)
    await running.until_empty()
