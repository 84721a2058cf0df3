"""Supervision of the processes of `pdserve up`.

A process that dies before all are ready ends the service, because a restart would fail the same
way. After that the supervisor never gives up: it restarts a process that ended on request at once,
and a process that died after a pause. The routers report a process that keeps dying as
crash-looping, and the other processes serve. On a stop, the routers let running requests finish,
then the workers drain. Processes that miss their deadline are killed. A second signal kills all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
import yaml
from msgspec.structs import replace

from pdserve.config import (
    LIVE_KEYS,
    MOVE_S,
    UNPIN_S,
    RouterConfig,
    WorkerConfig,
    refuse,
    to_mapping,
)
from pdserve.config.watch import file_changes, file_state
from pdserve.deploy.crash_loops import REPORT_EVERY_S, report_crash_loops
from pdserve.deploy.local import specs
from pdserve.deploy.local.follower import Change, LoadFollower
from pdserve.deploy.local.groups import RankGroup
from pdserve.deploy.local.progress import StartProgress
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess
from pdserve.deploy.scaling.load import RouterLoads
from pdserve.errors import ConfigError, PdserveError
from pdserve.model.hub import with_directories
from pdserve.net.discovery import Discovery
from pdserve.net.sockets import reachable
from pdserve.process.child import TAKE_REQUESTS
from pdserve.process.entry_points import PROCESSES, entry_point
from pdserve.process.forkserver import ForkServer, launched, until_ended
from pdserve.process.gpus import check_packages, gpus_for, is_cpu_build
from pdserve.process.memory import free_bytes
from pdserve.security import local
from pdserve.security.tls import dialer
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire import role_to_pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.config import Config
    from pdserve.deploy.local.display import Display

C = TypeVar("C", RouterConfig, WorkerConfig)

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

QUICK_STOP_S = 5.0  # for a process that is not serving
_MARGIN_S = 5.0  # added to the processes' own deadlines
_POLL_S = 0.05
_LOOK_S = 1.0
_SCALE_S = 1.0  # between two looks at the load
_LIST_TIMEOUT_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def make_run_dir(path: str = "") -> Path:
    """Return the directory for logs: a new one in the temporary folder if `path` is empty."""
    run_dir = Path(path or tempfile.mkdtemp(prefix="pdserve-"))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("up.run_dir", f"cannot create {run_dir}: {error}")
    return run_dir


def vllm_forkserver(run_dir: Path) -> ForkServer | None:
    """Return a server that forks processes with vLLM imported: the import takes most of a worker's
    start. Return None on GPUs, because CUDA does not survive a fork."""
    if not is_cpu_build():
        return None
    preload = entry_point(PROCESSES, "vllm-preload").value
    return ForkServer(preload, run_dir / "forkserver.log")


class Supervisor:
    """One `pdserve up`. Owns the processes, the files in the run directory and the ready file."""

    def __init__(
        self,
        config: Config,
        display: Display,
        forkserver: ForkServer | None = None,
        *,
        run_dir: Path | None = None,
        file: Path | None = None,
        reload: Callable[[], Config] | None = None,
    ) -> None:
        """Download models of the hub. `forkserver`: has imported vLLM. `run_dir` is used if
        `up.run_dir` is empty. `reload` reads the configuration again, after its `file` has changed.
        Raises ConfigError if this machine cannot run the configuration."""
        if config.worker.engine == "vllm":
            check_packages()
        self._file, self._reload = file, reload
        self._file_state = None if file is None else file_state(file)
        self._routers = specs.router_configs(config)
        self._workers = specs.worker_configs(config, os.sched_getaffinity(0), gpus_for(config))
        self._workers = {name: with_directories(x) for name, x in self._workers.items()}
        self._pools = specs.worker_pools(config)
        specs.check_memory(self._workers, self._pools, free_bytes())
        self._models = list(dict.fromkeys(x.served_names[0] for x in self._workers.values()))
        self._config, self._display = config, display
        self._ready_file = Path(config.up.ready_file) if config.up.ready_file else None
        self._run_dir = run_dir or make_run_dir(config.up.run_dir)
        if not config.router.store.database:
            store = replace(config.router.store, database=str(self._run_dir / "store"))
            self._routers = {name: replace(x, store=store) for name, x in self._routers.items()}
        sides = config.router.access, config.worker.access
        secrets = local.new_credentials(*sides)
        files = local.write_credentials(self._run_dir, secrets) | local.shared_files(*sides)
        self._routers = {name: _given(x, files) for name, x in self._routers.items()}
        self._workers = {name: _given(x, files) for name, x in self._workers.items()}
        access = replace(config.worker.access, **files)
        self._dialer = dialer(access, "worker.access")  # as a worker
        self._admin_key = secrets.get("admin_key_file", "")
        # vLLM leaves files in the temporary folder when it is killed.
        self._temporary_dir = tempfile.TemporaryDirectory(prefix="pdserve-tmp-")
        self._forkserver = None
        if config.worker.engine == "vllm":
            self._forkserver = forkserver or vllm_forkserver(self._run_dir)
        names = (*self._routers, *self._workers)
        pause_s = config.up.max_restart_pause_s
        self._children = {
            name: SupervisedProcess(name, self._run_dir / f"{name}.log", Restarts(pause_s))
            for name in names
        }
        self._groups: dict[str, RankGroup] = {}  # by the name of each rank
        for ranks in specs.groups_of(self._workers):
            group = RankGroup([self._children[name] for name in ranks])
            self._groups |= dict.fromkeys(ranks, group)
        for name in (*self._routers, *(x for p in self._pools for x in p.names[: p.least])):
            self._children[name].wanted.set()
        self._keep_warm()
        self._keepers: dict[str, asyncio.Task[int]] = {}
        self._is_serving = self._is_stopping = False
        # Signals: the first one stops, the second one kills.
        self._stopped: asyncio.Future[int]
        self._killed: asyncio.Future[int]

    async def run(self) -> int:
        """Start everything, serve until stopped, and return the exit code. No process is left."""
        loop = asyncio.get_running_loop()
        self._stopped, self._killed = loop.create_future(), loop.create_future()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        self._forget_ready_file()
        self._display.starting(self._wanted(), self._run_dir)
        for child in self._children.values():
            self._keepers[child.name] = asyncio.create_task(self._keep(child))
        starting = asyncio.create_task(self._until_ready())
        following: list[asyncio.Task[None]] = []
        try:
            # Each of these futures returns the exit code.
            ends = {self._stopped, *self._keepers.values()}
            done = await _first(starting, *ends)
            if done == {starting} and starting.result() == OK:
                self._is_serving = True
                self._announce()
                facts = [self._children[name].facts for name in self._routers]
                http, grpc_ = ([x[api] for x in facts] for api in ("http", "grpc"))
                has_console = self._config.router.has_console
                self._announce_key(grpc_)
                self._display.serving(http, grpc_, self._models, has_console=has_console)
                following = [asyncio.create_task(self._scale(x)) for x in self._followers()]
                following.append(asyncio.create_task(self._report_crash_loops()))
                following.append(asyncio.create_task(self._follow_file()))
                done = await _first(*ends)
            code: int = max(end.result() for end in done)
            for task in (starting, *following):
                task.cancel()
            await self._stop(code)
            return INTERRUPTED if self._killed.done() else code
        finally:
            self._display.close()
            self._forget_ready_file()
            for address in self._addresses() if self._admin_key else ():
                local.withdraw(address)
            # After an orderly stop no process is left. After an internal error, all may still run.
            tasks = (starting, *following, *self._keepers.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if self._forkserver is not None:
                self._forkserver.close()
            self._temporary_dir.cleanup()
            self._remove_run_dir()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _follow_file(self) -> None:
        """Write changes of the configuration file that need no restart to the routers' files, which
        routers watch."""
        if self._file is None or self._reload is None:
            return
        async for _ in file_changes(self._file, asyncio.Event(), self._file_state):
            try:
                new = (await asyncio.to_thread(self._reload)).router
            except ConfigError as error:
                self._display.tell(f"the configuration stays as it was: {error.message}", "red")
                continue
            for name, old in self._routers.items():
                access = replace(old.access, admin_keys=new.access.admin_keys)
                live = {key: getattr(new, key) for key in LIVE_KEYS}
                self._routers[name] = replace(old, access=access, **live)
                self._write_config(self._children[name])
            self._display.tell(f"{self._file} has changed; the routers' logs say what they use")

    def _remove_run_dir(self) -> None:
        """Remove a temporary run directory, unless its logs may show the cause of a failure."""
        failures = [x for x in self._children.values() if x.restarts.deaths or x.failure]
        was_told = self._is_serving and self._stopped.done() and not self._killed.done()
        if was_told and not failures and not self._config.up.run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _on_signal(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(OK)
        elif not self._killed.done():
            self._display.tell("stopping at once")
            self._killed.set_result(OK)

    async def _until_ready(self) -> int:
        """Return OK once every router can place work on every worker, or FAILED if a process makes
        no progress for too long."""
        limit_s, progress = self._config.up.start_timeout_s, StartProgress()
        serving = asyncio.create_task(self._until_serving())
        try:
            while not (await asyncio.wait({serving}, timeout=_LOOK_S))[0]:
                starting = {
                    name: (self._children[name].pid, self._children[name].reports)
                    for name in self._wanted()
                    if not self._children[name].facts
                }
                # All processes have started. Registration makes no reports.
                starting = starting or dict.fromkeys(self._running(), (os.getpid(), -1))
                if late := progress.stuck(starting, limit_s):
                    text = f"not ready, and no progress for {limit_s:g} s: {', '.join(late)}"
                    self._display.tell(text, "red")
                    return FAILED
            return serving.result()
        finally:
            serving.cancel()

    async def _until_serving(self) -> int:
        for name in self._wanted():
            await self._children[name].known.wait()
        for address in self._addresses():
            await self._until_registered(address)
        return OK

    async def _until_registered(self, address: str) -> None:
        """Return when the router at `address` can place work on every worker."""
        ready: set[str] = set()
        async with self._dialer.open_channel(address) as channel:
            list_workers = worker_pb2_grpc.RegistryStub(channel).ListWorkers
            while not ready.issuperset(self._running()):
                await asyncio.sleep(_POLL_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    listed = await list_workers(
                        worker_pb2.ListWorkersRequest(),
                        timeout=_LIST_TIMEOUT_S,
                        metadata=self._dialer.metadata,
                    )
                    ready |= {x.info.worker_id for x in listed.workers if x.state == "ready"}

    def _wanted(self) -> list[str]:
        return [child.name for child in self._children.values() if child.wanted.is_set()]

    def _running(self) -> list[str]:
        """Return the names of the workers that should take requests."""
        return [x for x in self._wanted() if x in self._workers and not self._children[x].warm]

    def _keep_warm(self) -> None:
        """Start new warm workers to replace those that take requests now."""
        for pool in self._pools:
            spare = [self._children[name] for name in pool.names if name not in self._running()]
            spare.sort(key=lambda child: not child.wanted.is_set())
            for child in spare[: pool.warm]:
                child.warm = True
                child.wanted.set()

    def _followers(self) -> list[LoadFollower]:
        """Return a load follower for each model whose number of workers may change."""
        scaling, discovery = self._config.up.scaling, Discovery(self._addresses())
        found = []
        for model in self._models:
            pools = [x for x in self._pools if x.model == model and x.role in specs.SCALED]
            may_change = scaling.to_zero_after_s or any(len(x.names) > x.least for x in pools)
            if may_change and any(pool.names for pool in pools):
                measure = RouterLoads(discovery, self._dialer, model).measure
                found.append(LoadFollower([x for x in pools if x.names], scaling, measure))
        return found

    async def _scale(self, follower: LoadFollower) -> None:
        """Start and stop workers as the load requires. A stopping worker first finishes its
        requests or hands them over."""
        grace_s = self._config.worker.drain_timeout_s + MOVE_S + UNPIN_S + _MARGIN_S
        while True:
            await asyncio.sleep(_SCALE_S)
            changes, now = list[Change](), time.monotonic()
            with contextlib.suppress(PdserveError):  # no router answers: the workers stay
                warm = [name for name, child in self._children.items() if child.warm]
                changes = await follower.look(self._running(), warm, now)
            told: list[str] = []
            for change in changes:
                told.append(change.reason)
                for name in change.start:
                    child = self._children[name]
                    if child.warm:
                        # A warm worker that is still loading restarts to take requests.
                        is_loaded = child.ready_at is not None
                        if is_loaded:
                            child.send(TAKE_REQUESTS)
                        else:
                            child.begin_anew()
                        how = "was loaded, and" if is_loaded else "starts anew, and"
                        told.append(f"{name} {how} takes requests")
                    child.warm = False
                    child.wanted.set()
                for name in change.stop:
                    child = self._children[name]
                    child.wanted.clear()
                    child.leaves_by = now + grace_s
                    child.send(signal.SIGTERM)
            if changes:
                self._keep_warm()
                self._announce()
            for line in told:
                self._display.tell(line)
            for child in self._children.values():
                if not child.wanted.is_set() and now > child.leaves_by:
                    child.send(signal.SIGKILL)

    async def _report_crash_loops(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            loops = [
                worker_pb2.CrashLoop(
                    worker_id=name,
                    role=role_to_pb(worker.role),
                    model=worker.served_names[0],
                    reason=self._children[name].restarts.reason,
                )
                for name, worker in self._workers.items()
                if self._children[name].is_crash_looping
            ]
            await report_crash_loops(self._dialer, self._addresses(), loops)

    async def _keep(self, child: SupervisedProcess) -> int:
        """Run a process, and restart it while the service is up. Return the service's exit code if
        it was stopped or cannot start."""
        if child.name in self._workers and self._config.router.grpc.port == 0:
            # A worker's configuration has the routers' addresses: wait until routers listen.
            for name in self._routers:
                await self._children[name].known.wait()
        await child.wanted.wait()
        for name in specs.before_on_gpu(self._workers, child.name):
            if self._children[name].wanted.is_set():
                await self._children[name].known.wait()
        while True:
            await child.wanted.wait()
            try:
                code = await self._run(child)
            except OSError as error:  # such as a full disk, or no more processes
                code, child.failure = FAILED, f"cannot start: {error}"
            if self._is_stopping:
                return OK
            if not child.wanted.is_set():
                self._display.tell(f"{child.name} has ended")
                continue
            has_served = code == OK and child.ready_at is not None
            if self._is_serving and (has_served or child.begins_anew):
                self._display.tell(f"{child.name} has ended and is restarted")
                continue
            self._display.died(child.name, code, child.failure, child.log)
            if not self._is_serving:
                return BAD_CONFIG if code == BAD_CONFIG else FAILED
            pause_s = child.died(code)
            state = ""
            if child.is_crash_looping:
                state = f"crash-looping ({child.restarts.deaths} deaths), and "
            self._display.tell(f"{child.name} is {state}restarted in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _run(self, child: SupervisedProcess) -> int:
        """Run a process to its end, and return its exit code, or minus the signal that ended it. A
        rank of a data-parallel group starts and ends with the others."""
        group = self._groups.get(child.name)
        if group is None:
            return await self._run_process(child)
        await group.meet()
        try:
            return await self._run_process(child)
        finally:
            if self._is_serving and not self._is_stopping:
                await group.end_with(child, QUICK_STOP_S)

    async def _run_process(self, child: SupervisedProcess) -> int:
        child.ready_at, child.failure, child.begins_anew = None, "", False
        warm = child.warm
        is_worker = child.name in self._workers
        config = self._write_config(child)
        forkserver = self._forkserver if is_worker else None
        if forkserver is not None:
            self._display.doing(child.name, "importing vLLM")
        words = ("pdserve", "worker" if is_worker else "router", "--config", str(config))
        env = {**os.environ, "TMPDIR": self._temporary_dir.name}
        async with launched(forkserver, *words, env=env, log=child.log) as (process, reports):
            child.process, child.pid = process, process.pid
            following = asyncio.create_task(self._follow(child, reports))
            if child.warm != warm or not child.wanted.is_set():  # changed while the process started
                child.begin_anew()
            try:
                return await until_ended(process, following)
            finally:
                child.process = None
                following.cancel()

    def _write_config(self, child: SupervisedProcess) -> Path:
        config = self._run_dir / f"{child.name}.yaml"
        # Private, because the file has hashes of keys and the engine's arguments.
        local.write_private(config, yaml.safe_dump(self._config_of(child), sort_keys=False))
        return config

    def _config_of(self, child: SupervisedProcess) -> dict[str, object]:
        if child.name in self._workers:
            worker = self._workers[child.name]
            worker = replace(worker, routers=self._addresses(), warm=child.warm)
            if child.name in self._groups:
                group = replace(worker.data_parallel, port=self._groups[child.name].port)
                worker = replace(worker, data_parallel=group)
            return {"worker": to_mapping(worker)}
        router = self._routers[child.name]
        if child.facts:  # a router that is restarted keeps its ports
            http, grpc = (int(child.facts[x].split(":")[-1]) for x in ("http", "grpc"))
            router = specs.with_ports(router, http, grpc)
        return {"router": to_mapping(router)}

    def _addresses(self) -> tuple[str, ...]:
        """Return the gRPC addresses of the routers."""
        return tuple(
            self._children[name].facts.get("grpc") or _grpc_address(router)
            for name, router in self._routers.items()
        )

    async def _follow(self, child: SupervisedProcess, reader: asyncio.StreamReader) -> None:
        """Read the reports of a process (pdserve/process/child.py)."""
        while line := await reader.readline():
            report = json.loads(line)
            child.reports += 1
            if "doing" in report:
                self._display.doing(child.name, report["doing"])
            elif "failed" in report:
                child.failure = report["failed"]
            else:
                child.facts, child.ready_at = report["ready"], time.monotonic()
                self._display.doing(child.name, "")
                if self._is_serving and not self._is_stopping:
                    self._announce()
                    self._display.tell(
                        f"{child.name} is {'back' if child.known.is_set() else 'ready'}"
                    )
                child.known.set()

    async def _stop(self, code: int) -> None:
        self._is_stopping = True
        for name, keeper in self._keepers.items():
            if self._children[name].process is None:  # it waits to be started
                keeper.cancel()
        if code == OK and self._is_serving:
            self._display.tell("stopping: running requests may finish; a second signal ends them")
            drain_s = self._config.worker.drain_timeout_s + MOVE_S + UNPIN_S
            await self._end(self._routers, self._config.router.stop_grace_s + _MARGIN_S)
            await self._end(self._workers, drain_s + _MARGIN_S)
        else:
            if code == OK:
                self._display.tell("stopping")
            await self._end(self._children, QUICK_STOP_S)

    async def _end(self, names: Iterable[str], grace_s: float) -> None:
        """End processes: SIGTERM, and SIGKILL after `grace_s`. Return early if all are to be
        killed."""
        children, began = [self._children[name] for name in names], time.monotonic()
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            keeper = self._keepers[child.name]
            limit_s = grace_s if child.ready_at is not None else min(grace_s, QUICK_STOP_S)
            left_s = max(0.0, began + limit_s - time.monotonic())  # one deadline for all
            await _first(keeper, self._killed, timeout=left_s)
            if not keeper.done() and not self._killed.done():
                child.failure = "did not stop in time and is killed"
                self._display.tell(f"{child.name} {child.failure}")
                child.send(signal.SIGKILL)

    def _announce_key(self, addresses: Iterable[str]) -> None:
        try:
            for address in addresses if self._admin_key else ():
                local.announce(address, self._admin_key)
        except (OSError, RuntimeError) as error:
            key = f"--api-key-file {self._run_dir}/admin.key"
            self._display.tell(f"commands that operate the service need {key} ({error})")

    def _announce(self) -> None:
        """Write the ready file, atomically. Roles are those at start."""
        if self._ready_file is None:
            return
        entries = {
            child.name: {**child.facts, "pid": child.pid, "log": str(child.log)}
            for child in self._children.values()
        }
        routers = [entries[name] for name in self._routers]
        workers = [
            {**entries[name], "worker_id": name, "role": worker.role.value}
            for name, worker in self._workers.items()
            if name in self._running() and self._children[name].facts
        ]
        content = {
            "pid": os.getpid(),
            "http": routers[0]["http"],
            "grpc": routers[0]["grpc"],
            "model": self._models[0],
            "run_dir": str(self._run_dir),
            "router": routers[0],
            "routers": routers,
            "workers": workers,
        }
        partial = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._ready_file)

    def _forget_ready_file(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)


def _given(config: C, files: Mapping[str, str]) -> C:
    """Return the configuration of a process with the credentials in `files`."""
    return replace(config, access=replace(config.access, **files))


async def _first(
    *ends: asyncio.Future[int], timeout: float | None = None
) -> set[asyncio.Future[int]]:
    done, _ = await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return done


def _grpc_address(router: RouterConfig) -> str:
    host = f"[{router.grpc.host}]" if ":" in router.grpc.host else router.grpc.host
    return reachable(f"{host}:{router.grpc.port}")
