"""Bytes between the hosts of two regions, counted on their network devices: no KV of a request that
is bound to one region leaves it, while workers die."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from benchmarks.service import LoggedProcess
from pdserve.client import Client
from pdserve.net import rpc
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from tests.support.cluster import fake_answer
from tests.support.network_namespaces import Network, missing_requirement
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path

WHY_NOT = missing_requirement()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
GRPC = 8001
ROUTER, HOSTS = 0, {"eu": 1, "us": 2}
WORKERS = ("prefill-eu", "decode-eu", "decode-eu-2", "prefill-us", "decode-us")
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
FAKE = {"engine": "fake", "engine_args": "{step_s: 0.02, prefill_s: 0.0005}"}


class Service:
    """A router, and the workers of both regions, each region on its host."""

    client: Client
    registry: RegistryStub

    def __init__(self, network: Network, stack: AsyncExitStack, directory: Path) -> None:
        self.network, self._stack, self._directory = network, stack, directory
        self._processes: dict[str, LoggedProcess] = {}
        self._asked = 0

    async def start(self) -> None:
        address = self.network.address
        at = dict.fromkeys(("http.host", "grpc.host"), address(ROUTER))
        at |= {"topology.region": "eu", "residency.regions": "[eu, us]"}
        at |= {"policy": "least_loaded"}
        starting = [self._run("router", ROUTER, at)]
        for name in WORKERS:
            role, region = name.split("-")[:2]
            host = address(HOSTS[region])
            at = {"worker_id": name, "role": role, "topology.region": region, **FAKE}
            at |= {"host": host, "kv.host": host, "routers": f"['{address(ROUTER)}:{GRPC}']"}
            starting.append(self._run(name, HOSTS[region], at))
        await asyncio.gather(*starting)
        there = await self._stack.enter_async_context(self.network.forward(ROUTER, GRPC))
        channel = await self._stack.enter_async_context(rpc.open_channel(there))
        self.registry = RegistryStub(channel)
        self.client = await self._stack.enter_async_context(Client(there))
        await self.until_ready()

    async def _run(self, name: str, host: int, settings: dict[str, str]) -> None:
        command = "router" if name == "router" else "worker"
        words = [sys.executable, "-m", "pdserve", command]
        for key, value in settings.items():
            words += ["--set", f"{command}.{key}={value}"]

        async def is_ready() -> bool:
            return command == "worker" or await self.network.listens(host, GRPC)

        child = self._processes[name] = LoggedProcess(name, self._directory / f"{name}.log")
        self._stack.push_async_callback(child.stop)
        await child.start(self.network.command(host, words), is_ready)

    async def until_ready(self) -> None:
        """Wait until the router reports all workers that were not killed as ready."""

        async def is_so() -> bool:
            listed = await self.registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
            ready = {x.info.worker_id for x in listed.workers if x.state == "ready"}
            return ready == self._processes.keys() - {"router"}

        await wait_until(is_so, pause_s=0.05)

    async def kill(self, name: str) -> None:
        await self._processes.pop(name).stop(signal.SIGKILL)

    async def ask(self, begun: asyncio.Event | None = None, geo: str = "") -> None:
        """Ask, and compare each token of the answer. Set `begun` after some of them."""
        self._asked += 1
        prompt = [20 + (self._asked * 37 + x * x) % 200 for x in range(100)]
        found: list[int] = []
        async for delta in self.client.generate(prompt, LONG, inference_geo=geo):
            found += delta.token_ids
            if begun is not None and len(found) > 10:
                begun.set()
        (model,) = await self.client.list_models()
        assert found == fake_answer(prompt, LONG, model.vocab_size).token_ids

    @property
    def between_workers(self) -> int:
        """The bytes that went from one region's workers to the other's."""
        eu, us = HOSTS.values()
        return self.network.sent[eu, us] + self.network.sent[us, eu]


async def test_no_byte_of_kv_leaves_its_region_while_workers_die(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * WAIT_S), AsyncExitStack() as stack:
        service = Service(stack.enter_context(Network(3)), stack, tmp_path)
        await service.start()
        events = [asyncio.Event() for _ in range(12)]
        asking = [asyncio.create_task(service.ask(x, "eu")) for x in events]
        await asyncio.gather(*(x.wait() for x in events))
        for name in ("decode-eu", "prefill-us"):
            await service.kill(name)
        await asyncio.gather(*asking)
        await asyncio.gather(*(service.ask(geo="eu") for _ in range(4)))
        assert service.between_workers == 0
        # The same devices count the KV of requests that may be anywhere: no decode worker is left
        # in eu, and no prefill worker in us.
        await service.kill("decode-eu-2")
        await service.until_ready()
        await service.ask()
        assert service.between_workers > 0
