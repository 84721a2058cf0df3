"""pdserve on a Ray cluster of three hosts: a head without work and two nodes. No death loses or
changes an answer that another worker can give, and dead processes are restarted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import pytest_asyncio
import yaml

from pdserve import demo
from pdserve.client import Client
from pdserve.deploy.ray.spec import place_of
from pdserve.types import SamplingParams
from tests.support.cluster import fake_answer
from tests.support.model_kinds import make_kind
from tests.support.network_namespaces import Network, missing_requirement
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

util = pytest.importorskip(
    "ray.autoscaler._private.util", reason="needs Ray: make ray-install", exc_type=ImportError
)
WHY_NOT = missing_requirement()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
HEAD, NODES = 0, (1, 2)
CPUS = 8
GCS, GRPC, DASHBOARD = 6379, {"router-0": 8001, "router-1": 8011}, 8265
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
CONFIG = """\
up: {routers: 2, prefill: {workers: 1}, decode: {workers: 1}}
router: {policy: least_loaded, stop_grace_s: 2}
worker:
  engine: fake
  engine_args: {step_s: 0.02, prefill_s: 0.0005, transfer_s: 0.005, max_num_seqs: 8}
  drain_timeout_s: 1
"""
# vLLM, and the ranks of the decode worker on both nodes. test_network.py has stages on two hosts.
SPREAD = """\
up:
  routers: 2
  prefill: {workers: 1}
  decode: {workers: 1, nnodes: 2, engine_args: {tensor_parallel_size: 2}}
router: {policy: least_loaded, stop_grace_s: 2}
worker:
  engine_args: {dtype: float32, kv_cache_memory_bytes: 67108864}
  drain_timeout_s: 1
"""
# vLLM, and decode as two ranks that share the experts of a model.
RANKS = """\
up:
  routers: 2
  prefill: {workers: 1}
  decode: {workers: 1, data_parallel_size: 2, engine_args: {enable_expert_parallel: true}}
router: {policy: least_loaded, stop_grace_s: 2}
worker:
  model_names: [pdserve-demo]
  engine_args: {dtype: float32, kv_cache_memory_bytes: 67108864}
  drain_timeout_s: 1
"""
MODELS = {
    "up.routers": 2,
    "up.models": [{"model_names": [x]} for x in "ab"],
    "up.scaling.to_zero_after_s": 4,
}
RAY, STATUS = "ray.scripts.scripts", ("pdserve", "status", "--on=ray", "--json")
# Prints the status of the service, or null, for each line that it reads.
LOOK = """
import json, sys
from pdserve.deploy.ray import service
from pdserve.errors import PdserveError
for _ in sys.stdin:
    try:
        with service.joined():
            found = service.status()
    except PdserveError:
        found = None
    print("status", json.dumps(found), flush=True)
"""
KEEPS = {"RAY_gcs_storage": "rocksdb"}
# Ray finds out within seconds that a node is gone; by default it takes longer. A busy machine may
# keep a node from answering for some of them.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    # Nodes outlive the head for longer than a slow machine needs to start it again.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


class RayCluster:
    """A head and nodes. Each has its own network, processes, temporary folder and
    /dev/shm, as a host."""

    def __init__(self, directory: Path) -> None:
        self.network = Network(1 + len(NODES))
        self._directory = directory
        self._env = {**os.environ, **HEALTH, "HOME": str(directory)}
        # Without it, each worker would import vLLM a second time to look at its model's class.
        self._env.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
        self._env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        self._env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"{self._at(HEAD)}:{GCS}"}
        # A short path: Ray's sockets are in it. Each host mounts its own folder there.
        self._tmp = Path(tempfile.mkdtemp(prefix="ray-"))
        self._env |= {"TMPDIR": str(self._tmp), "RAY_gcs_storage_path": str(self._tmp / "gcs")}
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, dict[str, bool]] = {}  # arguments of each host's last start
        self._looking: asyncio.subprocess.Process | None = None
        self._routers: dict[str, str] = {}  # node of each
        self._asked = 0
        (directory / "job").mkdir()
        # The pools of each model have their own keys.
        (directory / "two.yaml").write_text("\n".join(CONFIG.splitlines()[1:]))
        (directory / "spread.yaml").write_text(SPREAD)
        (directory / "ranks.yaml").write_text(RANKS)
        for path in (directory / "service.yaml", directory / "job" / "service.yaml"):
            path.write_text(CONFIG)

    def _at(self, host: int) -> str:
        return self.network.address(host)

    def start(self, host: int, *, keeps: bool = True, dashboard: bool = False) -> None:
        """Start Ray on a host. A head `keeps` its state."""
        self._started[host] = {"keeps": keeps, "dashboard": dashboard}
        self.network.heal()
        tmp = self._directory / f"tmp-{host}"
        (tmp / "gcs").mkdir(parents=True, exist_ok=True)
        words = f"{sys.executable} -m {RAY} start --block --disable-usage-stats"
        words += f" --node-ip-address={self._at(host)} --object-store-memory=80000000"
        if host == HEAD:
            words += f" --head --port={GCS} --num-cpus=0 --include-dashboard={dashboard}"
            words += f" --dashboard-host={self._at(HEAD)} --temp-dir={self._tmp}"
        else:
            words += f" --address={self._at(HEAD)}:{GCS} --num-cpus={CPUS}"
        # Ray learns its address from the default route.
        script = f"ip route add default dev eth0; mount --bind {tmp} {self._tmp}"
        script += f"; mount -t tmpfs -o size=1g tmpfs /dev/shm; {words}; exit 1"
        own = ["unshare", "-mpf", "--mount-proc", "--kill-child", "sh", "-c", script]
        with (self._directory / f"host-{host}.log").open("ab") as log:
            self._hosts[host] = subprocess.Popen(
                self.network.command(host, own),
                env={**self._env, **(KEEPS if keeps else {})},
                stdout=log,
                stderr=log,
            )

    def start_again(self) -> None:
        """Start Ray on hosts that have ended: it gives a start up after 30 s, on a slow machine
        too."""
        for host, process in list(self._hosts.items()):
            if process.poll() is not None:
                self.start(host, **self._started[host])

    def kill(self, host: int) -> None:
        """Every process of a host ends at once, and others hear nothing of it: the kernel ends
        them with the first one."""
        self.network.split(host)
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

    def rank_on_second_node(self) -> psutil.Process:
        """Return the process of the only rank that is on another node than its worker's first."""
        (follower,) = self.processes("ray::Follower")
        return follower.children()[0]

    def logs(self, end: str) -> list[Path]:
        """Return the logs of processes whose names end so."""
        return list(self._directory.glob(f"tmp-*/pdserve-*{end}/log"))

    async def pdserve(self, *words: str, code: int = 0) -> str:
        """Run a command of pdserve on the head; return what it prints."""
        return await self.run("pdserve", *words, "--on", "ray", code=code)

    async def upgrade(self, *changes: str, code: int = 0) -> str:
        return await self.pdserve("upgrade", "--config=service.yaml", *changes, code=code)

    async def run(self, module: str, *words: str, code: int = 0) -> str:
        """Run a module of Python on the head; return what it prints."""
        process = await self._python("-m", module, *words, stderr=asyncio.subprocess.PIPE)
        try:
            out, err = await asyncio.wait_for(process.communicate(), START_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == code, (out + err).decode()
        return (out + err).decode()

    async def _python(self, *words: str, **pipes: int) -> asyncio.subprocess.Process:
        """Start Python on the head. It ends with the head."""
        head = self._hosts[HEAD]

        def processes() -> list[psutil.Process]:
            assert head.poll() is None, "the head has ended"
            return psutil.Process(head.pid).children()

        (first,) = await wait_until(processes)
        inside = ["nsenter", f"--target={first.pid}", "-m", "-p", "env", f"-C{self._directory}"]
        return await asyncio.create_subprocess_exec(
            *self.network.command(HEAD, [*inside, sys.executable, *words]),
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            **pipes,
        )

    async def until_said(self, text: str, *words: str) -> None:
        """Run a module of Python on the head again and again, until it prints a text."""

        async def is_said() -> bool:
            self.start_again()
            return text in " ".join((await self.run(*words)).split())

        await wait_until(is_said, within_s=START_S, pause_s=0.5)

    async def until_joined(self) -> None:
        """Wait until commands reach the head."""
        async with asyncio.timeout(START_S):
            while "no service" not in (out := await self._try_status()):
                print(out)  # noqa: T201
                await asyncio.sleep(1)
                self.start_again()

    async def _try_status(self) -> str:
        try:
            return await self.pdserve("status", "--json", code=1)
        except AssertionError as error:
            return str(error)

    async def status(self) -> dict[str, Any]:
        out = await self.pdserve("status", "--json")
        found: dict[str, Any] = json.loads(out[out.index("{") : out.rindex("}") + 1])
        return found

    async def _look(self) -> dict[str, Any] | None:
        """Return the status, or None while the head or the service is away. One process looks each
        time: a new one would import Ray for longer than a look takes."""
        if self._looking is None:
            self._looking = await self._python("-c", LOOK, stdin=asyncio.subprocess.PIPE)
        assert self._looking.stdin is not None
        assert self._looking.stdout is not None
        with suppress(ConnectionError):
            self._looking.stdin.write(b"\n")
            while line := await self._looking.stdout.readline():  # Ray may print lines too
                if line.startswith(b"status "):
                    found: dict[str, Any] | None = json.loads(line.removeprefix(b"status "))
                    return found
        await self._looking.wait()
        self._looking = None
        return None

    async def until_upgrading(self) -> None:
        """Wait until an upgrade has begun. A command would look too late, and not see it."""

        async def is_so() -> bool:
            status = await self._look()
            return status is not None and status["upgrading"]

        await wait_until(is_so, within_s=START_S)

    async def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for processes by place that are all ready, one at each, and for which `is_so`."""
        async with asyncio.timeout(START_S):
            while True:
                if (status := await self._look()) is not None:
                    self.last = status["processes"]
                    found = {place_of(name): x for name, x in self.last.items()}
                    ready = all(x["ready"] for x in self.last.values())
                    if ready and len(found) == len(self.last) and is_so(found):
                        self._routers = {name: x["node"] for name, x in found.items()}
                        return found
                await asyncio.sleep(0.2)

    async def until_workers(self, decode: int) -> dict[str, Any]:
        wanted = {*GRPC, "prefill-0", *(f"decode-{i}" for i in range(decode))}
        return await self.until(lambda found: found.keys() == wanted)

    async def scaled(self, decode: int) -> dict[str, Any]:
        await self.pdserve("scale", f"decode={decode}")
        return await self.until_workers(decode)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Return a client with the addresses of both routers, where `until` last saw them: a look
        at the cluster takes seconds."""
        hosts = {self._at(host): host for host in NODES}
        async with AsyncExitStack() as stack:
            addresses = [
                await stack.enter_async_context(
                    self.network.forward(hosts[self._routers[name]], port, at=HEAD)
                )
                for name, port in GRPC.items()
            ]
            yield await stack.enter_async_context(Client(addresses))

    @asynccontextmanager
    async def answers(self, count: int = 8, of: str = "pdserve-demo") -> AsyncIterator[None]:
        """So many answers of a model are open while the body runs, one after the other. All are
        complete and right."""
        begun, stopped = [asyncio.Event() for _ in range(count)], asyncio.Event()
        async with self.client() as client:
            (model,) = (x for x in await client.list_models() if x.name == of)

            async def read(i: int) -> None:
                while not stopped.is_set():
                    prompt, got = self._prompt(), list[int]()
                    async for delta in client.generate(prompt, LONG, model=of):
                        got += delta.token_ids
                        if len(got) > 10:
                            begun[i].set()
                    assert got == fake_answer(prompt, LONG, model.vocab_size).token_ids

            async with asyncio.timeout(START_S), asyncio.TaskGroup() as group:
                for i in range(count):
                    group.create_task(read(i))
                for event in begun:
                    await event.wait()
                yield
                stopped.set()

    def _prompt(self) -> list[int]:
        """Return a prompt that differs from all others."""
        self._asked += 1
        return [20 + (self._asked * 37 + x * x) % 200 for x in range(200)]

    async def close(self) -> None:
        for host in list(self._hosts):
            self.kill(host)
        if self._looking is not None:
            await self._looking.wait()
        self._tmp.rmdir()


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[RayCluster]:
    """Yield a cluster whose hosts have joined."""
    cluster = RayCluster(directory)
    async with AsyncExitStack() as stack:
        stack.enter_context(cluster.network)
        stack.push_async_callback(cluster.close)
        for host in (HEAD, *NODES):
            cluster.start(host)
            if host == HEAD:
                await cluster.until_joined()
        await cluster.until_said(f"/{CPUS * len(NODES)}.0 CPU", RAY, "status")
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayCluster]:
    """Start a cluster that keeps its state, with a service of one worker per role."""
    directory = tmp_path_factory.mktemp("ray")
    async with running(directory) as cluster:
        said = await cluster.pdserve("up", "--config", "service.yaml")
        assert said.count("HTTP at http://10.77.0.1") == 2
        assert "a service runs" in await cluster.pdserve("up", code=2)
        await cluster.until_workers(1)
        yield cluster


async def test_workers_are_added_and_drained_under_load(ray_cluster: RayCluster) -> None:
    async with ray_cluster.answers():
        await ray_cluster.scaled(4)
    async with ray_cluster.answers():
        await ray_cluster.scaled(1)
    assert "'encoder' is not one of" in await ray_cluster.pdserve("scale", "encoder=1", code=2)


async def test_a_killed_worker_is_restarted(ray_cluster: RayCluster) -> None:
    await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        (worker,) = ray_cluster.processes("pdserve-decode-0-")
        worker.kill()
    await ray_cluster.until(lambda found: found["decode-0"]["lives"] == 2)


async def test_a_killed_actor_is_restarted_with_its_worker(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        (worker,) = ray_cluster.processes("pdserve-decode-1-")
        worker.parent().kill()
    old = (before["decode-1"]["node"], before["decode-1"]["actor_pid"])
    await ray_cluster.until(lambda x: (x["decode-1"]["node"], x["decode-1"]["actor_pid"]) != old)


async def test_a_restarted_controller_finds_running_processes(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        (controller,) = ray_cluster.processes("ray::Controller")
        controller.kill()
        controller.wait(WAIT_S)
    after = await ray_cluster.until(lambda found: found.keys() == before.keys())
    assert {n: x["pid"] for n, x in after.items()} == {n: x["pid"] for n, x in before.items()}


async def test_processes_of_a_dead_node_restart_elsewhere(ray_cluster: RayCluster) -> None:
    """This includes a router: the client has the addresses of both."""
    before = await ray_cluster.scaled(4)
    both = {*map(ray_cluster.network.address, NODES)}
    for role in ("decode", "router"):
        assert {x["node"] for n, x in before.items() if role in n} == both
    (gone,) = (x for x in NODES if ray_cluster.network.address(x) == before["router-0"]["node"])
    async with ray_cluster.answers():
        ray_cluster.kill(gone)
        stays = {before["router-1"]["node"]}
        await ray_cluster.until(lambda found: {x["node"] for x in found.values()} == stays)
    async with ray_cluster.answers():
        ray_cluster.start(gone)


async def test_all_go_on_while_the_head_is_away(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        ray_cluster.kill(HEAD)
        ray_cluster.start(HEAD)
        after = await ray_cluster.until_workers(2)
        assert {n: x["pid"] for n, x in after.items()} == {n: x["pid"] for n, x in before.items()}
        await ray_cluster.scaled(3)


async def test_an_upgrade_replaces_all_and_loses_nothing(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Upgrade the configuration and the model, which is a copy with the same name. The controller
    is killed too."""
    model = shutil.copytree(Path(demo.__file__).parent / "model", tmp_path / "model")
    before = await ray_cluster.scaled(2)
    changes = (f"--model={model}", "--model-name=pdserve-demo", "--set=router.policy=round_robin")
    async with ray_cluster.answers():
        upgrade = asyncio.create_task(ray_cluster.upgrade("--decode=7", *changes))
        await ray_cluster.until_upgrading()
        (controller,) = ray_cluster.processes("ray::Controller")
        controller.kill()
        assert (await upgrade).count("HTTP at http://10.77.0.1") == 2
        after = await ray_cluster.until_workers(2)
    for old, new in zip(before.values(), after.values(), strict=True):
        assert (old["node"], old["pid"]) != (new["node"], new["pid"])
    for router in GRPC:
        assert after[router]["grpc"] == before[router]["grpc"]


async def test_an_upgrade_that_does_not_start_is_undone(ray_cluster: RayCluster) -> None:
    before = await ray_cluster.scaled(2)
    async with ray_cluster.answers():
        said = await ray_cluster.upgrade("--set=worker.engine_args.step_s=-1", code=2)
        assert "the upgrade was undone" in said
        assert "engine_args.step_s" in said
        after = await ray_cluster.until_workers(2)
    same = ("decode-0", "decode-1", "prefill-0")
    assert [after[x]["pid"] for x in same] == [before[x]["pid"] for x in same]
    assert "engine_args.step_s" in (await ray_cluster.status())["refused"]
    too_large = ("--cpus-per-worker=99", "--set=up.start_timeout_s=1")
    assert "a node with 99 CPU free" in await ray_cluster.upgrade(*too_large, code=2)


async def test_workers_follow_the_load(ray_cluster: RayCluster) -> None:
    await ray_cluster.scaled(1)
    rules = ("up.scaling.up_after_s=1", "up.scaling.down_after_s=3", "up.scaling.target_load=0.5")
    warm = "--set=up.decode.warm_workers=1"
    await ray_cluster.upgrade("--max-decode=3", warm, *(f"--set={rule}" for rule in rules))
    assert "decode follows the load" in await ray_cluster.pdserve("scale", "decode=2", code=2)
    before = await ray_cluster.until_workers(2)
    assert (before["decode-0"]["warm"], before["decode-1"]["warm"]) == (False, True)
    async with ray_cluster.answers(16):
        after = await ray_cluster.until(lambda x: "decode-2" in x and not x["decode-2"]["warm"])
    # It took requests at once.
    assert after["decode-1"]["pid"] == before["decode-1"]["pid"]
    await ray_cluster.until(lambda x: "decode-2" not in x and x["decode-1"]["warm"])


async def test_status_shows_processes_that_wait_for_a_node(ray_cluster: RayCluster) -> None:
    upgrade = asyncio.create_task(ray_cluster.upgrade("--cpus-per-worker=99", code=1))
    await ray_cluster.until_said("waiting for a node with 99 CPU free", *STATUS)
    # What an autoscaler adds nodes for.
    await ray_cluster.until_said("pending placement groups", RAY, "status")
    await ray_cluster.upgrade("--cpus-per-worker=1")
    assert "another upgrade" in await upgrade
    await ray_cluster.until_workers(1)


async def test_down_leaves_no_process_no_actor_and_no_placement_group(
    ray_cluster: RayCluster,
) -> None:
    await ray_cluster.pdserve("down")
    actors = ("ray::Host", "ray::Controller")
    await wait_until(lambda: not any(map(ray_cluster.processes, actors)), pause_s=0.2)
    assert ray_cluster.processes("-m pdserve") == []
    assert "no service on this Ray cluster" in await ray_cluster.pdserve("status", code=1)
    await ray_cluster.until_said(f"0.0/{CPUS * len(NODES)}.0 CPU", RAY, "status")


async def test_a_job_starts_a_service(ray_cluster: RayCluster) -> None:
    """Jobs need a head with a dashboard. The service is packed on one node."""
    ray_cluster.kill(HEAD)
    ray_cluster.start(HEAD, dashboard=True)
    await ray_cluster.until_joined()
    at = f"--address=http://{ray_cluster.network.address(HEAD)}:{DASHBOARD}"
    up = [sys.executable, "-m", "pdserve", "up", "--on=ray", "--config=service.yaml"]
    words = ("job", "submit", at, "--working-dir=job", "--", *up, "--strategy=pack")
    said = await ray_cluster.run(RAY, *words)
    assert said.count("HTTP at http://10.77.0.1") == 2
    found = await ray_cluster.until_workers(1)
    assert len({x["node"] for x in found.values()}) == 1
    async with ray_cluster.answers():
        pass
    await ray_cluster.pdserve("down")


async def test_a_worker_over_two_nodes_fails_and_comes_back_as_one(
    ray_cluster: RayCluster,
) -> None:
    prompt = [20 + x * x % 200 for x in range(200)]
    begun = asyncio.Event()

    async def answer() -> tuple[list[int], str]:
        token_ids, worker = list[int](), ""
        async for delta in client.generate(prompt, LONG):
            token_ids += delta.token_ids
            worker = delta.receipt.decode_worker if delta.receipt else worker
            begun.set()
        return token_ids, place_of(worker)

    await ray_cluster.pdserve("up", "--config=spread.yaml")
    found = await ray_cluster.until_workers(1)
    assert len(found["decode-0"]["node"].split(", ")) == 2
    async with ray_cluster.client() as client:
        whole, worker = await answer()
        assert worker == "decode-0"
        begun.clear()
        # A rank that is stopped lets decode make no token: only prefill's first one comes.
        rank = ray_cluster.rank_on_second_node()
        rank.suspend()
        open_answers = [asyncio.create_task(answer()) for _ in range(2)]
        await begun.wait()
        rank.kill()
        assert [await x for x in open_answers] == [(whole, "prefill-0")] * 2
        await ray_cluster.until(lambda x: x["decode-0"]["lives"] == 2)
        assert await answer() == (whole, "decode-0")
    assert ray_cluster.logs("-node-1")
    await ray_cluster.pdserve("down")
    assert ray_cluster.processes("ray::Follower") == []
    # The other part ends by itself when the first one has drained: only a failure leaves a log.
    assert ray_cluster.logs("-node-1") == []


async def test_a_data_parallel_group_fails_and_comes_back_as_one(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    prompts = [[20 + (x * x + place) % 200 for x in range(200)] for place in range(4)]
    model = await make_kind(tmp_path / "moe", "Qwen3-MoE")

    async def answer(prompt: list[int], begun: asyncio.Event) -> tuple[list[int], str]:
        token_ids, worker = list[int](), ""
        async for delta in client.generate(prompt, LONG):
            token_ids += delta.token_ids
            worker = delta.receipt.decode_worker if delta.receipt else worker
            begun.set()
        return token_ids, worker

    async def answers() -> dict[str, list[list[int]]]:
        """Ask all prompts at once until both ranks answer, since each registers for itself. Return
        the answers by the rank that decoded them."""

        async def found() -> dict[str, list[list[int]]] | None:
            made: dict[str, list[list[int]]] = {}
            for token_ids, worker in await asyncio.gather(
                *(answer(x, asyncio.Event()) for x in prompts)
            ):
                made.setdefault(worker, []).append(token_ids)
            return made if len(made) == 2 else None

        return await wait_until(found, within_s=START_S, pause_s=0.5)

    await ray_cluster.pdserve("up", "--config=ranks.yaml", f"--set=worker.model={model}")
    await ray_cluster.until_workers(1)
    async with ray_cluster.client() as client:
        whole = await answers()
        first, second = sorted(whole)
        assert (place_of(first), second) == ("decode-0", f"{first}.1")
        begun = asyncio.Event()
        rank = ray_cluster.rank_on_second_node()
        rank.suspend()  # ranks make their steps together, so neither makes a token
        open_answers = [asyncio.create_task(answer(x, begun)) for x in prompts]
        await begun.wait()
        rank.kill()
        moved = [await x for x in open_answers]
        assert {place_of(worker) for _, worker in moved} == {"prefill-0"}
        right = sorted(x for tokens in whole.values() for x in tokens)
        assert sorted(token_ids for token_ids, _ in moved) == right
        await ray_cluster.until(lambda x: x["decode-0"]["lives"] == 2)
        again = await answers()
        assert sorted(again) == [first, second]
        assert sorted(x for tokens in again.values() for x in tokens) == right
    await ray_cluster.pdserve("down")
    assert ray_cluster.processes("ray::Follower") == []


async def test_models_without_requests_stop_and_start_each_on_its_own(
    ray_cluster: RayCluster,
) -> None:
    settings = (f"--set={key}={json.dumps(value)}" for key, value in MODELS.items())
    await ray_cluster.pdserve("up", "--config=two.yaml", *settings)
    await ray_cluster.until(lambda found: found.keys() == GRPC.keys())
    assert (await ray_cluster.status())["at_zero"] == ["a", "b"]
    async with ray_cluster.answers(2, of="b"):
        await ray_cluster.until(lambda x: x.keys() == {*GRPC, "prefill-b-0", "decode-b-0"})
    await ray_cluster.until(lambda found: found.keys() == GRPC.keys())
    await ray_cluster.pdserve("down")


async def test_a_head_that_forgets_is_refused(ray_cluster: RayCluster) -> None:
    ray_cluster.kill(HEAD)
    ray_cluster.start(HEAD, keeps=False)
    await ray_cluster.until_joined()
    said = await ray_cluster.pdserve("up", "--config", "service.yaml", code=2)
    assert "--allow-fragile-head" in said


async def test_ray_takes_the_cluster_file() -> None:
    path = Path(__file__).parents[2] / "deploy" / "ray" / "cluster.yaml"
    config = util.prepare_config(yaml.safe_load(path.read_text("utf-8")))
    util.validate_config(config)
    with pytest.raises(Exception, match="misspelt"):
        util.validate_config({**config, "misspelt": 1})
