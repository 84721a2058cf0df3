"""Two regions with a link of 80 ms between them: one dies under load. No answer is lost that may be
in the other one, no answer is where it may not be, and what was apart works together again."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.service import LoggedProcess
from pdserve.client import Client
from pdserve.errors import Refusal, Unavailable
from pdserve.net import rpc
from pdserve.types import SamplingParams
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.worker_pb2_grpc import RegistryStub
from tests.support.cluster import fake_answer
from tests.support.network_namespaces import LinkQuality, Network, missing_requirement
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.types import Receipt

WHY_NOT = missing_requirement()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
GRPC = 8001
# A router and a worker of each region, by host.
ROUTERS, WORKERS = {"eu": 0, "us": 2}, {"eu": 1, "us": 3}
FAR = LinkQuality(delay_s=0.04)  # one way
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
SHORT = replace(LONG, max_tokens=20)
FAKE = {"engine": "fake", "engine_args": "{step_s: 0.02, prefill_s: 0.0005}"}


@dataclass(slots=True)
class Asked:
    """One answer at the router in eu."""

    prompt: list[int]
    sampling: SamplingParams
    values: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)
    receipt: Receipt | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: Client) -> None:
        async for delta in client.generate(self.prompt, self.sampling, **self.values):
            self.token_ids += delta.token_ids
            self.receipt = delta.receipt
            if len(self.token_ids) > 10:
                self.begun.set()


class Service:
    """Both regions on their hosts, and the client, registry and admin of the router in eu."""

    client: Client
    registry: RegistryStub
    admin: AdminStub

    def __init__(self, network: Network, stack: AsyncExitStack, directory: Path) -> None:
        self._network, self._stack, self._directory = network, stack, directory
        self._asked = 0

    async def start(self) -> None:
        self.far()
        starting = []
        for region, host in ROUTERS.items():
            (other,) = {*ROUTERS} - {region}
            peer = f"{self._network.address(ROUTERS[other])}:{GRPC}"
            at = dict.fromkeys(("http.host", "grpc.host"), self._network.address(host))
            at |= {"topology.region": region, "residency.regions": "[eu, us]", "lease_s": "1"}
            at |= {"peers": f"[{{region: {other}, address: '{peer}'}}]", "queue.timeout_s": "1"}
            starting.append(self._run(f"router-{region}", host, "router", at))
        for region, host in WORKERS.items():
            router = f"{self._network.address(ROUTERS[region])}:{GRPC}"
            at = {"worker_id": f"aggregated-{region}", "role": "aggregated", **FAKE}
            at |= {"host": self._network.address(host), "routers": f"[{router}]"}
            at |= {"topology.region": region}
            starting.append(self._run(at["worker_id"], host, "worker", at))
        await asyncio.gather(*starting)
        address = await self._stack.enter_async_context(self._network.forward(0, GRPC))
        channel = await self._stack.enter_async_context(rpc.open_channel(address))
        self.registry, self.admin = RegistryStub(channel), AdminStub(channel)
        self.client = await self._stack.enter_async_context(Client(address))
        await self.until("ready", "")

    def far(self) -> None:
        """Heal the network, with the link between the regions."""
        self._network.heal()
        self._network.change(FAR, (0, 1), (2, 3))
        self._network.change(FAR, (2, 3), (0, 1))

    async def _run(self, name: str, host: int, command: str, settings: dict[str, str]) -> None:
        words = [sys.executable, "-m", "pdserve", command]
        for key, value in settings.items():
            words += ["--set", f"{command}.{key}={value}"]

        async def is_ready() -> bool:
            return command == "worker" or await self._network.listens(host, GRPC)

        child = LoggedProcess(name, self._directory / f"{name}.log")
        self._stack.push_async_callback(child.stop)
        await child.start(self._network.command(host, words), is_ready)

    async def until(self, worker: str, peer: str) -> None:
        """Wait until the router in eu reports this state of its worker, and this beginning of the
        reason why it does not use us."""

        async def is_so() -> bool:
            listed = await self.registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
            reason = listed.peers[0].reason
            is_peer = reason.startswith(peer) if peer else not reason and listed.peers[0].models
            return bool(is_peer) and [x.state for x in listed.workers] == [worker]

        await wait_until(is_so, pause_s=0.05)

    def ask(
        self, count: int, sampling: SamplingParams = LONG, **values: Any
    ) -> tuple[list[Asked], list[asyncio.Task[None]]]:
        asked = []
        for _ in range(count):
            self._asked += 1
            prompt = [20 + (self._asked * 37 + x * x) % 200 for x in range(100)]
            asked.append(Asked(prompt, sampling, values))
        return asked, [asyncio.create_task(x.read(self.client)) for x in asked]

    async def complete(self, asked: list[Asked], tasks: list[asyncio.Task[None]]) -> set[str]:
        """Wait for the answers, and compare each token. Return the regions that ended them."""
        await asyncio.gather(*tasks)
        (model,) = await self.client.list_models()
        for x in asked:
            assert x.token_ids == fake_answer(x.prompt, x.sampling, model.vocab_size).token_ids
        return {x.receipt.forwarded_to for x in asked if x.receipt is not None}


async def test_a_region_dies_under_load_and_no_answer_is_lost_that_may_leave(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(2 * WAIT_S), AsyncExitStack() as stack:
        network = stack.enter_context(Network(4))
        service = Service(network, stack, tmp_path)
        await service.start()
        # The workers of eu are cut off. Its answers go on in us, but for those bound to eu.
        free, bound = service.ask(8), service.ask(2, inference_geo="eu")
        for x in (*free[0], *bound[0]):
            await x.begun.wait()
        network.split(WORKERS["eu"])
        assert await service.complete(*free) == {"us"}
        assert await service.complete(*service.ask(4, SHORT)) == {"us"}
        for refused in await asyncio.gather(
            *bound[1], *service.ask(1, SHORT, inference_geo="eu")[1], return_exceptions=True
        ):
            assert isinstance(refused, Unavailable), refused
            assert refused.reason == Refusal.NO_WORKER_IN_REGION
            assert refused.retry_after_s > 0
        # It is back, and serves its own requests again.
        service.far()
        await service.until("ready", "")
        assert await service.complete(*service.ask(2, SHORT)) == {""}
        # Now eu drains, and then us is cut off with all that it serves for eu.
        drain = service.admin.DrainRouter(a.DrainRouterRequest(), timeout=WAIT_S)
        assert [x.drained async for x in drain] == [True]
        there = service.ask(8)
        for x in there[0]:
            await x.begun.wait()
        await service.admin.UndrainRouter(a.UndrainRouterRequest(), timeout=WAIT_S)
        network.split(ROUTERS["us"], WORKERS["us"])
        assert await service.complete(*there) == {""}
        regions = [x.receipt.regions for x in there[0] if x.receipt is not None]
        assert regions == [("eu", "us")] * 8
        await service.until("ready", "it does not answer")
        assert await service.complete(*service.ask(2, SHORT)) == {""}
        service.far()
        await service.until("ready", "")
