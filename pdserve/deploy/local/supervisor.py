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
from typing import TYPE_CHECKING, NamedTuple

import grpc.aio
import yaml
from msgspec.structs import replace

from pdserve.config import (
    MOVE_S,
    UNPIN_S,
    RouterConfig,
    refuse,
    to_mapping,
)
from pdserve.config.watch import file_changes, file_state
from pdserve.deploy.crash_loops import REPORT_EVERY_S, report_crash_loops
from pdserve.deploy.local import specs
from pdserve.deploy.local.follower import Change, LoadFollower
from pdserve.deploy.local.groups import RankGroup
from pdserve.deploy.local.launcher import Launcher, vllm_forkserver
from pdserve.deploy.local.plan import ServicePlan
from pdserve.deploy.local.progress import StartProgress
from pdserve.deploy.local.ready_file import ReadyFile
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess, death_reason
from pdserve.deploy.local.spare_compiler import SpareCompiler
from pdserve.deploy.local.stop_signals import StopSignals
from pdserve.deploy.scaling.load import RouterLoads
from pdserve.errors import ConfigError, PdserveError
from pdserve.net.discovery import Discovery
from pdserve.net.sockets import reachable
from pdserve.process.child import TAKE_REQUESTS
from pdserve.process.forkserver import ForkServer, until_ended
from pdserve.process.gpus import check_packages
from pdserve.security import local
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire import role_to_pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.config import Config
    from pdserve.deploy.local.display import Display

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

QUICK_STOP_S = 5.0  # for a process that is not serving
_MARGIN_S = 5.0  # added to the processes' own deadlines
_POLL_S = 0.05
_LOOK_S = 1.0
_SCALE_S = 1.0  # between two looks at the load
_LIST_TIMEOUT_S = 2.0


def make_run_dir(path: str = "") -> Path:
    """Return the directory for logs: a new one in the temporary folder if `path` is empty."""
    run_dir = Path(path or tempfile.mkdtemp(prefix="pdserve-"))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("up.run_dir", f"cannot create {run_dir}: {error}")
    return run_dir


class LiveFile(NamedTuple):
    """A configuration file, some of whose keys can change without a restart. `reload` reads it;
    `state`: when it was read last."""

    path: Path
    reload: Callable[[], Config]
    state: tuple[int, ...] | None

    @staticmethod
    def of(path: Path | None, reload: Callable[[], Config] | None) -> LiveFile | None:
        if path is None or reload is None:
            return None
        return LiveFile(path, reload, file_state(path))


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
        self._file = LiveFile.of(file, reload)
        self._plan = ServicePlan.of(config)
        self._config, self._display = config, display
        self._run_dir = run_dir or make_run_dir(config.up.run_dir)
        self._plan.settle(config, self._run_dir)
        self._ready_file = ReadyFile(config.up.ready_file, self._run_dir)
        is_vllm = config.worker.engine == "vllm"
        forks = (forkserver or vllm_forkserver(self._run_dir)) if is_vllm else None
        self._launcher = Launcher(forks)
        names = (*self._plan.routers, *self._plan.workers)
        pause_s = config.up.max_restart_pause_s
        self._children = {
            name: SupervisedProcess(name, self._run_dir / f"{name}.log", Restarts(pause_s))
            for name in names
        }
        self._groups: dict[str, RankGroup] = {}  # by the name of each rank
        for ranks in specs.groups_of(self._plan.workers):
            group = RankGroup([self._children[name] for name in ranks])
            self._groups |= dict.fromkeys(ranks, group)
        first = [name for pool in self._plan.pools for name in pool.names[: pool.least]]
        for name in (*self._plan.routers, *first):
            self._children[name].wanted.set()
        self._keep_warm()
        self._keepers: dict[str, asyncio.Task[int]] = {}
        self._is_serving = self._is_stopping = False
        self._signals: StopSignals

    async def run(self) -> int:
        """Start everything, serve until stopped, and return the exit code. No process is left."""
        self._signals = StopSignals(lambda: self._display.tell("stopping at once"), OK)
        self._ready_file.remove()
        self._display.starting(self._wanted(), self._run_dir)
        for child in self._children.values():
            self._keepers[child.name] = asyncio.create_task(self._keep(child))
        starting = asyncio.create_task(self._until_ready())
        following: list[asyncio.Task[None]] = []
        try:
            # Each of these futures returns the exit code.
            ends = {self._signals.stopped, *self._keepers.values()}
            done = await _first(starting, *ends)
            if done == {starting} and starting.result() == OK:
                self._is_serving = True
                self._announce()
                facts = [self._children[name].facts for name in self._plan.routers]
                http, grpc_ = ([x[api] for x in facts] for api in ("http", "grpc"))
                has_console = self._config.router.has_console
                self._announce_key(grpc_)
                self._display.serving(http, grpc_, self._plan.models, has_console=has_console)
                following = [asyncio.create_task(self._scale(x)) for x in self._followers()]
                following.append(asyncio.create_task(self._report_crash_loops()))
                following.append(asyncio.create_task(self._follow_file()))
                following.append(asyncio.create_task(self._make_code()))
                done = await _first(*ends)
            code: int = max(end.result() for end in done)
            for task in (starting, *following):
                task.cancel()
            await self._stop(code)
            return INTERRUPTED if self._signals.killed.done() else code
        finally:
            self._display.close()
            self._ready_file.remove()
            for address in self._addresses() if self._plan.admin_key else ():
                local.withdraw(address)
            # After an orderly stop no process is left. After an internal error, all may still run.
            tasks = (starting, *following, *self._keepers.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._launcher.close()
            self._remove_run_dir()
            self._signals.close()

    async def _make_code(self) -> None:
        """Make compiled code that the next start can use."""
        for code in self._plan.codes:
            if code.text:
                self._display.tell(f"{code.model} {code.text}")
        plan = self._plan
        spare = SpareCompiler(plan.records, self._launcher, self._display, self._run_dir)
        await spare.make(plan.codes, plan.workers, plan.kv_cache_bytes)

    async def _follow_file(self) -> None:
        """Write changes of the configuration file that need no restart to the routers' files, which
        routers watch."""
        if self._file is None:
            return
        async for _ in file_changes(self._file.path, asyncio.Event(), self._file.state):
            try:
                new = (await asyncio.to_thread(self._file.reload)).router
            except ConfigError as error:
                self._display.tell(f"the configuration stays as it was: {error.message}", "red")
                continue
            self._plan.change_routers(new)
            for name in self._plan.routers:
                self._write_config(self._children[name])
            text = f"{self._file.path} has changed; the routers' logs say what they use"
            self._display.tell(text)

    def _remove_run_dir(self) -> None:
        """Remove a temporary run directory, unless its logs may show the cause of a failure."""
        failures = [x for x in self._children.values() if x.restarts.deaths or x.failure]
        stopped, killed = self._signals.stopped.done(), self._signals.killed.done()
        was_told = self._is_serving and stopped and not killed
        if was_told and not failures and not self._config.up.run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)

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
        # Workers that were ready may have begun anew, because another could not load its code.
        while True:
            for name in self._wanted():
                await self._children[name].known.wait()
            for address in self._addresses():
                await self._until_registered(address)
            if all(self._children[name].known.is_set() for name in self._wanted()):
                return OK

    async def _until_registered(self, address: str) -> None:
        """Return when the router at `address` can place work on every worker."""
        ready: set[str] = set()
        async with self._plan.dialer.open_channel(address) as channel:
            list_workers = worker_pb2_grpc.RegistryStub(channel).ListWorkers
            while not ready.issuperset(self._running()):
                await asyncio.sleep(_POLL_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    listed = await list_workers(
                        worker_pb2.ListWorkersRequest(),
                        timeout=_LIST_TIMEOUT_S,
                        metadata=self._plan.dialer.metadata,
                    )
                    ready |= {x.info.worker_id for x in listed.workers if x.state == "ready"}

    def _wanted(self) -> list[str]:
        return [child.name for child in self._children.values() if child.wanted.is_set()]

    def _running(self) -> list[str]:
        """Return the names of the workers that should take requests."""
        return [x for x in self._wanted() if x in self._plan.workers and not self._children[x].warm]

    def _keep_warm(self) -> None:
        """Start new warm workers to replace those that take requests now."""
        for pool in self._plan.pools:
            spare = [self._children[name] for name in pool.names if name not in self._running()]
            spare.sort(key=lambda child: not child.wanted.is_set())
            for child in spare[: pool.warm]:
                child.warm = True
                child.wanted.set()

    def _followers(self) -> list[LoadFollower]:
        """Return a load follower for each model whose number of workers may change."""
        scaling, discovery = self._config.up.scaling, Discovery(self._addresses())
        found = []
        for model in self._plan.models:
            pools = [x for x in self._plan.pools if x.model == model and x.role in specs.SCALED]
            may_change = scaling.to_zero_after_s or any(len(x.names) > x.least for x in pools)
            if may_change and any(pool.names for pool in pools):
                measure = RouterLoads(discovery, self._plan.dialer, model).measure
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
                for name, worker in self._plan.workers.items()
                if self._children[name].is_crash_looping
            ]
            await report_crash_loops(self._plan.dialer, self._addresses(), loops)

    async def _keep(self, child: SupervisedProcess) -> int:
        """Run a process, and restart it while the service is up. Return the service's exit code if
        it was stopped or cannot start."""
        if child.name in self._plan.workers and self._config.router.grpc.port == 0:
            # A worker's configuration has the routers' addresses: wait until routers listen.
            for name in self._plan.routers:
                await self._children[name].known.wait()
        await child.wanted.wait()
        for name in specs.before_on_gpu(self._plan.workers, child.name):
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
            runs_on = child.begins_anew or (self._is_serving and has_served)
            if runs_on or self._runs_eagerly(child, code):
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

    def _runs_eagerly(self, child: SupervisedProcess, code: int) -> bool:
        """Start a model eagerly whose worker did not start compiled. Return False if `child` is no
        such worker."""
        can_change = not self._is_serving and code != BAD_CONFIG
        changed = self._plan.run_eagerly(child.name) if can_change else None
        if changed is None:
            return False
        reason = death_reason(code, child.failure, child.log)
        self._display.tell(
            f"{child.name} did not start with compiled code ({reason}): all workers of "
            f"{changed.model} start eagerly"
        )
        for other in (self._children[name] for name in changed.names if name != child.name):
            other.facts = {}
            other.known.clear()
            other.begin_anew()
        return True

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
        is_worker = child.name in self._plan.workers
        config = self._write_config(child)
        if is_worker and self._launcher.imports_first:
            self._display.doing(child.name, "importing vLLM")
        # A service that runs keeps its kind: its workers compile code that is no longer there.
        code = "load" if self._plan.loads_code(child.name) and not self._is_serving else ""
        launched = self._launcher.launched(child.log, config, is_worker=is_worker, code=code)
        async with launched as (process, reports):
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
        if child.name in self._plan.workers:
            worker = self._plan.workers[child.name]
            worker = replace(worker, routers=self._addresses(), warm=child.warm)
            if child.name in self._groups:
                group = replace(worker.data_parallel, port=self._groups[child.name].port)
                worker = replace(worker, data_parallel=group)
            return {"worker": to_mapping(worker)}
        router = self._plan.routers[child.name]
        if child.facts:  # a router that is restarted keeps its ports
            http, grpc = (int(child.facts[x].split(":")[-1]) for x in ("http", "grpc"))
            router = specs.with_ports(router, http, grpc)
        return {"router": to_mapping(router)}

    def _addresses(self) -> tuple[str, ...]:
        """Return the gRPC addresses of the routers."""
        return tuple(
            self._children[name].facts.get("grpc") or _grpc_address(router)
            for name, router in self._plan.routers.items()
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
            await self._end(self._plan.routers, self._config.router.stop_grace_s + _MARGIN_S)
            await self._end(self._plan.workers, drain_s + _MARGIN_S)
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
            await _first(keeper, self._signals.killed, timeout=left_s)
            if not keeper.done() and not self._signals.killed.done():
                child.failure = "did not stop in time and is killed"
                self._display.tell(f"{child.name} {child.failure}")
                child.send(signal.SIGKILL)

    def _announce_key(self, addresses: Iterable[str]) -> None:
        try:
            for address in addresses if self._plan.admin_key else ():
                local.announce(address, self._plan.admin_key)
        except (OSError, RuntimeError) as error:
            key = f"--api-key-file {self._run_dir}/admin.key"
            self._display.tell(f"commands that operate the service need {key} ({error})")

    def _announce(self) -> None:
        """Write the ready file."""
        workers = {name: self._children[name] for name in self._running()}
        self._ready_file.write(
            self._plan.models[0],
            [self._children[name] for name in self._plan.routers],
            {name: child for name, child in workers.items() if child.facts},
            {name: worker.role.value for name, worker in self._plan.workers.items()},
        )


async def _first(
    *ends: asyncio.Future[int], timeout: float | None = None
) -> set[asyncio.Future[int]]:
    done, _ = await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return done


def _grpc_address(router: RouterConfig) -> str:
    host = f"[{router.grpc.host}]" if ":" in router.grpc.host else router.grpc.host
    return reachable(f"{host}:{router.grpc.port}")
