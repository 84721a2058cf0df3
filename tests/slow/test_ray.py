"""pdserve on a Ray cluster of three hosts: a head without work and two nodes. Whatever dies, no
answer is lost or wrong while a worker can give it, and what died comes back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import pytest_asyncio

from pdserve.client import Client
from pdserve.types import SamplingParams
from tests import netlab
from tests.cluster import fake_answer
from tests.netlab import Network
from tests.patience import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytest.importorskip("ray", reason="needs Ray: make ray-install")
WHY_NOT = netlab.why_not()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
HEAD, NODES = 0, (1, 2)
CPUS = 6
GCS, GRPC = 6379, 8001
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
CONFIG = """\
up: {prefill: {workers: 1}, decode: {workers: 1}}
router: {policy: least_loaded}
worker: {engine: fake, engine_args: {step_s: 0.02, prefill_s: 0.0005, transfer_s: 0.005}}
"""
# Ray finds out within seconds that a node is gone; by default it takes longer.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}


class RayCluster:
    """A head and nodes. Each has its own network, processes, temporary folder and
    /dev/shm, as a host."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.network = Network(1 + len(NODES))
        self._directory = directory
        self._env = {**os.environ, **HEALTH, **environment, "HOME": str(directory)}
        self._env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        self._env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"{self._at(HEAD)}:{GCS}"}
        # A short path: Ray's sockets are in it. Each host mounts its own folder there.
        self._tmp = Path(tempfile.mkdtemp(prefix="ray-"))
        self._env |= {"TMPDIR": str(self._tmp), "RAY_gcs_storage_path": str(self._tmp / "gcs")}
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._asked = 0
        (directory / "service.yaml").write_text(CONFIG)

    def _at(self, host: int) -> str:
        return self.network.address(host)

    def start(self, host: int) -> None:
        """Start Ray on a host."""
        tmp = self._directory / f"tmp-{host}"
        (tmp / "gcs").mkdir(parents=True, exist_ok=True)
        words = f"{sys.executable} -m ray.scripts.scripts start --block --disable-usage-stats"
        words += f" --node-ip-address={self._at(host)} --object-store-memory=80000000"
        if host == HEAD:
            words += f" --head --port={GCS} --num-cpus=0 --include-dashboard=false"
            words += f" --temp-dir={self._tmp}"
        else:
            words += f" --address={self._at(HEAD)}:{GCS} --num-cpus={CPUS}"
        # Ray learns its address from the default route.
        script = f"ip route add default dev eth0; mount --bind {tmp} {self._tmp}"
        script += f"; mount -t tmpfs -o size=1g tmpfs /dev/shm; {words}; exit 1"
        own = ["unshare", "-mpf", "--mount-proc", "--kill-child", "sh", "-c", script]
        with (self._directory / f"host-{host}.log").open("ab") as log:
            self._hosts[host] = subprocess.Popen(
                self.network.command(host, own), env=self._env, stdout=log, stderr=log
            )

    def kill(self, host: int) -> None:
        """Every process of a host ends at once: the kernel ends them with the first one."""
        unshare = self._hosts.pop(host)
        if children := psutil.Process(unshare.pid).children():
            children[0].kill()
        unshare.wait(WAIT_S)

    def processes(self, word: str) -> list[psutil.Process]:
        """Return the processes of all hosts with `word` in their command line."""
        found = []
        for host in self._hosts.values():
            for process in psutil.Process(host.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if word in " ".join(process.cmdline()):
                        found.append(process)
        return found

    async def pdserve(self, *words: str, code: int = 0) -> str:
        """Run a command on the head; return what it prints."""
        while not (found := psutil.Process(self._hosts[HEAD].pid).children()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        (first,) = found
        inside = ["nsenter", f"--target={first.pid}", "-m", "-p", sys.executable, "-m", "pdserve"]
        process = await asyncio.create_subprocess_exec(
            *self.network.command(HEAD, [*inside, *words, "--on", "ray"]),
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), START_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == code, (out + err).decode()
        return (out + err).decode()

    async def until_joined(self) -> None:
        """Every host has a raylet, and commands reach the head."""
        async with asyncio.timeout(START_S):
            while "no service" not in (out := await self._try_status()):
                print(out)  # noqa: T201
                await asyncio.sleep(1)

    async def _try_status(self) -> str:
        try:
            return await self.pdserve("status", "--json", code=1)
        except AssertionError as error:
            return str(error)

    async def status(self) -> dict[str, Any]:
        out = await self.pdserve("status", "--json")
        found: dict[str, Any] = json.loads(out[out.index("{") : out.rindex("}") + 1])
        return found

    async def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for processes that are all ready, and for which `is_so`."""
        async with asyncio.timeout(START_S):
            while True:
                self.last = (await self.status())["processes"]
                if all(x["ready"] for x in self.last.values()) and is_so(self.last):
                    return self.last
                await asyncio.sleep(0.2)

    async def scaled(self, decode: int) -> dict[str, Any]:
        await self.pdserve("scale", f"decode={decode}")
        wanted = {"router", "prefill-0", *(f"decode-{i}" for i in range(decode))}
        return await self.until(lambda found: found.keys() == wanted)

    @asynccontextmanager
    async def answers(self, count: int = 8) -> AsyncIterator[None]:
        """So many answers have begun when the body runs, and are complete and right at the end."""
        node = (await self.status())["processes"]["router"]["node"]
        host = next(x for x in NODES if self._at(x) == node)
        prompts = [self._prompt() for _ in range(count)]
        got: list[list[int]] = [[] for _ in prompts]
        begun = [asyncio.Event() for _ in prompts]
        async with self.network.forward(host, GRPC) as address, Client(address) as client:

            async def read(i: int) -> None:
                async for delta in client.generate(prompts[i], LONG):
                    got[i] += delta.token_ids
                    if len(got[i]) > 10:
                        begun[i].set()

            async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as group:
                for i in range(count):
                    group.create_task(read(i))
                for event in begun:
                    await event.wait()
                yield
            (model,) = await client.list_models()
        for prompt, tokens in zip(prompts, got, strict=True):
            assert tokens == fake_answer(prompt, LONG, model.vocab_size).token_ids

    def _prompt(self) -> list[int]:
        """No two are the same."""
        self._asked += 1
        return [20 + (self._asked * 37 + x * x) % 200 for x in range(200)]

    async def close(self) -> None:
        for host in list(self._hosts):
            self.kill(host)
        self._tmp.rmdir()


@asynccontextmanager
async def running(directory: Path, **environment: str) -> AsyncIterator[RayCluster]:
    """Yield a cluster whose hosts have joined."""
    cluster = RayCluster(directory, **environment)
    async with AsyncExitStack() as stack:
        stack.enter_context(cluster.network)
        stack.push_async_callback(cluster.close)
        for host in (HEAD, *NODES):
            cluster.start(host)
            if host == HEAD:
                await cluster.until_joined()
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayCluster]:
    """A cluster that keeps its state, with a service of one worker a role."""
    directory = tmp_path_factory.mktemp("ray")
    async with running(directory, RAY_gcs_storage="rocksdb") as cluster:
        said = await cluster.pdserve("up", "--config", str(directory / "service.yaml"))
        assert "router: HTTP at http://10.77.0.1" in said
        assert "a service runs" in await cluster.pdserve("up", code=2)
        yield cluster


async def test_workers_are_added_and_drained_under_load(ray_cluster: RayCluster) -> None:
    async with ray_cluster.answers():
        await ray_cluster.scaled(4)
    async with ray_cluster.answers():
        await ray_cluster.scaled(1)
    assert "'encoder' is not one of" in await ray_cluster.pdserve("scale", "encoder=1", code=2)


async def test_a_worker_that_is_killed_comes_back(ray_cluster: RayCluster) -> None:
    await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        (worker,) = ray_cluster.processes("pdserve-decode-0-")
        worker.kill()
    await ray_cluster.until(lambda found: found["decode-0"]["lives"] == 2)


async def test_an_actor_that_is_killed_comes_back_with_its_worker(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        (worker,) = ray_cluster.processes("pdserve-decode-1-")
        worker.parent().kill()
    old = (before["decode-1"]["node"], before["decode-1"]["actor_pid"])
    await ray_cluster.until(lambda x: (x["decode-1"]["node"], x["decode-1"]["actor_pid"]) != old)


async def test_the_controller_comes_back_and_finds_what_runs(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        (controller,) = ray_cluster.processes("ray::Controller")
        controller.kill()
        controller.wait(WAIT_S)
    after = await ray_cluster.until(lambda found: found.keys() == before.keys())
    assert {n: x["pid"] for n, x in after.items()} == {n: x["pid"] for n, x in before.items()}


async def test_what_ran_on_a_node_that_dies_comes_back_elsewhere(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(4)
    network, stays = ray_cluster.network, before["router"]["node"]
    (gone,) = (x for x in NODES if network.address(x) != stays)
    assert {x["node"] for n, x in before.items() if "decode" in n} == {*map(network.address, NODES)}
    async with ray_cluster.answers():
        ray_cluster.kill(gone)
    await ray_cluster.until(lambda found: {x["node"] for x in found.values()} == {stays})
    async with ray_cluster.answers():
        ray_cluster.start(gone)


async def test_down_leaves_no_process_and_no_actor(ray_cluster: RayCluster) -> None:
    await ray_cluster.pdserve("down")
    async with asyncio.timeout(WAIT_S):
        while any(map(ray_cluster.processes, ("ray::Host", "ray::Controller"))):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert ray_cluster.processes("-m pdserve") == []
    assert "no service on this Ray cluster" in await ray_cluster.pdserve("status", code=1)
