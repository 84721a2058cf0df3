"""The Ray actor of one router, worker, or data-parallel group of workers.

The router or worker is a child process of the actor, because vLLM needs its own event loop, signal
handlers and garbage collector settings. If Ray kills the actor, the kernel kills the child
(`pdserve/process/child.py`).
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
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.config import overlay
from pdserve.deploy.local.groups import free_ports
from pdserve.deploy.local.restarts import Restarts
from pdserve.deploy.ray.child_state import ChildState
from pdserve.deploy.ray.spec import write_process
from pdserve.process.child import TAKE_REQUESTS
from pdserve.process.forkserver import launched, until_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.deploy.ray.spec import ProcessSpec

_PARTS_END_S = 15.0  # after the end of one node's process, for the others to end by themselves


class Host:
    """The actor of a router, worker or group. State: the child process and what is known of it, its
    further processes, and whether it should run."""

    def __init__(
        self, name: str, spec: ProcessSpec, secrets: dict[str, str], max_restart_pause_s: float
    ) -> None:
        self._name, self._spec, self._secrets = name, spec, secrets
        self._run_dir = Path(tempfile.mkdtemp(prefix=f"pdserve-{name}-"))
        self._child = ChildState(self._run_dir / "log", Restarts(max_restart_pause_s))
        self._parts = Parts(name, spec, secrets, ray.util.get_node_ip_address())
        self._routers: list[str] = []
        self._warm = False
        self._has_routers = asyncio.Event()
        self._process: Any = None
        self._node_id = ray.get_runtime_context().get_node_id()
        self._ends_to_begin = False  # it restarts to become warm, or to stop being warm
        self._stopped = asyncio.Event()
        # The child is started from the event loop's thread, which lives as long as the actor. The
        # kernel kills a child when the thread that forked it ends.
        self._keeper = asyncio.get_event_loop().create_task(self._keep())

    async def state(self) -> dict[str, Any]:
        """Return the state of this process for `pdserve status --on ray`."""
        return {
            "node": ", ".join(dict.fromkeys(self._parts.nodes)),
            "node_id": self._node_id,
            "pid": self._process.pid if self._process else 0,
            "actor_pid": os.getpid(),
            "routers": self._routers,
            "warm": self._warm,
            **self._child.row(),
        }

    async def grace(self) -> float:
        """Return the maximum duration of `stop` in seconds."""
        return self._spec.grace_s

    async def tell(self, addresses: Sequence[str], warm: bool) -> None:
        """Write the routers' addresses into the file that the worker watches. A `warm` worker is
        loaded but accepts no requests. When it is no longer warm it accepts them at once."""
        _write_routers(self._run_dir, addresses)
        self._routers = list(addresses)
        for actor in self._parts.actors:
            actor.tell.remote(self._routers)
        self._has_routers.set()
        if warm != self._warm:
            self._warm = warm
            if self._child.is_ready and not warm:
                self._child.take_requests(warm=warm)
                self._send(TAKE_REQUESTS)
            else:
                self._begin_anew()

    async def stop(self) -> None:
        """Drain the process and wait until it ends. Kill it after its grace period. Delete its
        directory with the log."""
        self._stopped.set()
        self._send(signal.SIGTERM)
        if self._spec.ranks > 1:  # else node 0 ends the others
            for actor in self._parts.actors:
                actor.stop.remote()
        await asyncio.wait((self._keeper,), timeout=self._spec.grace_s)
        self._keeper.cancel()  # kills the process if it is still running
        await asyncio.wait((self._keeper,))
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def _begin_anew(self) -> None:
        """Restart the process. Send only one SIGTERM, because a second one would end its drain."""
        if self._process is not None and not self._ends_to_begin:
            self._ends_to_begin = True
            self._child.begin_anew()
            self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)

    async def _keep(self) -> None:
        """Run the process, and restart it when it ends, until `stop`."""
        if self._spec.command == "worker":
            self._child.doing = "waiting for a router"
            await _first(self._stopped, self._has_routers.wait())
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                code = await self._run()
            except (OSError, ValueError, ray.exceptions.RayError) as error:
                code, self._child.failure = 1, f"cannot start: {error}"
            if self._ends_to_begin:
                self._ends_to_begin = False
                continue
            pause_s = self._child.died(code, time.monotonic() - began)
            if not self._stopped.is_set():
                await _first(self._stopped, asyncio.sleep(pause_s))

    async def _run(self) -> int:
        """Run the process, and its further ones, until it ends. Return its exit code."""
        section, warm = self._section(), self._warm
        self._child.start()
        if self._spec.parts > 1:
            self._child.doing = f"waiting for {self._spec.parts - 1} more processes"
        async with self._parts.running(section, self._routers, self._stopped) as (own, failed):
            words = write_process(self._run_dir, self._spec.command, section | own, self._secrets)
            log = self._child.log
            async with launched(None, *words, env=os.environ, log=log) as (process, reports):
                self._process = process
                following = [asyncio.create_task(self._follow(reports))]
                if failed is not None:
                    following.append(asyncio.create_task(self._end_with(failed)))
                if self._stopped.is_set():
                    self._send(signal.SIGTERM)
                elif warm != self._warm:
                    self._begin_anew()
                try:
                    return await until_ended(process, following[0])
                finally:
                    self._process, self._child.facts = None, {}
                    for task in following:
                        task.cancel()

    async def _end_with(self, failed: asyncio.Task[str]) -> None:
        """Kill the first process when another one has ended, because it would wait for the other to
        join."""
        self._child.failure = await asyncio.shield(failed)
        self._send(signal.SIGKILL)

    def _section(self) -> dict[str, Any]:
        """Return the configuration with the keys that depend on the node."""
        section, at = self._spec.section, self._parts.nodes[0]
        if self._spec.command == "router":
            return overlay(section, {"http.host": at, "grpc.host": at})
        routers = [f"file:{self._run_dir / 'routers'}"]
        kv = {**section["kv"], "host": at}
        ours = {"worker_id": self._name, "host": at, "kv": kv, "routers": routers}
        return {**section, **ours, "warm": self._warm}

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Read the reports of the process (`pdserve/process/child.py`)."""
        while line := await reader.readline():
            self._child.report(json.loads(line), warm=self._warm)


class Parts:
    """The processes of a worker on other nodes, or of a group's other ranks. State: their `actors`,
    and the addresses of the `nodes` of all processes, the first one's first."""

    def __init__(self, name: str, spec: ProcessSpec, secrets: dict[str, str], address: str) -> None:
        """`address`: of the first process."""
        self._name, self._spec, self._secrets = name, spec, secrets
        self.nodes = [address]
        self.actors: list[Any] = []

    @contextlib.asynccontextmanager
    async def running(
        self, section: dict[str, Any], routers: Sequence[str], stopped: asyncio.Event
    ) -> AsyncIterator[tuple[dict[str, Any], asyncio.Task[str] | None]]:
        """Start the processes, if there are any. Yield the configuration with which the first one
        finds them, and a task that returns why it has to end: another one did. If one ends, all end
        soon after. Their actors end with this one. Raises OSError if `stopped` is set before."""
        if self._spec.parts == 1:
            yield {}, None
            return
        address = self.nodes[0]
        actors = self.actors = self._make_actors()
        failed: asyncio.Task[str] | None = None
        try:
            addresses = asyncio.gather(*(_result(actor.address.remote()) for actor in actors))
            await _first(stopped, addresses)
            if addresses.cancelled() or not addresses.done():
                raise OSError("stopped while waiting for its other processes")
            self.nodes = [address, *addresses.result()]
            port = free_ports(address)
            ends = [
                asyncio.create_task(
                    _result(actor.run.remote({**section, **self._part(rank, port)}, routers))
                )
                for rank, actor in enumerate(actors, start=1)
            ]
            failed = asyncio.create_task(self._failure(ends))
            yield self._part(0, port), failed
            await asyncio.wait(ends, timeout=_PARTS_END_S)
        finally:
            if failed is not None:
                failed.cancel()
            self.nodes, self.actors = [address], []
            for actor in actors:
                ray.kill(actor)

    def _make_actors(self) -> list[Any]:
        group = ray.util.get_current_placement_group()
        return [
            ray.remote(Follower)
            .options(
                num_cpus=self._spec.cpus,
                num_gpus=self._spec.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            .remote(_run_dir(self._name, rank), self._secrets)
            for rank in range(1, self._spec.parts)
        ]

    def _part(self, rank: int, port: int) -> dict[str, Any]:
        """Return the configuration of one process of this worker or group: they meet at `port`."""
        meeting = {"rank": rank, "address": self.nodes[0], "port": port}
        if self._spec.ranks == 1:
            return {"nodes": {"count": self._spec.parts, **meeting}}
        group = {"size": self._spec.parts, "group": self._name, **meeting}
        return {"data_parallel": group} | ({"worker_id": f"{self._name}.{rank}"} if rank else {})

    async def _failure(self, others: Sequence[asyncio.Task[int]]) -> str:
        """Return why the first process has to end, some time after another one has ended."""
        done, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        rank = others.index(done.pop()) + 1
        await asyncio.sleep(_PARTS_END_S)
        return f"its part on {self.nodes[rank]} ended, see {_run_dir(self._name, rank)}"


class Follower:
    """The actor of a worker's process on a further node, or of a further rank of a group. The first
    actor owns it, so both end together."""

    def __init__(self, run_dir: Path, secrets: dict[str, str]) -> None:
        self._run_dir, self._secrets = run_dir, secrets
        self._process: Any = None
        self._address: str = ray.util.get_node_ip_address()
        run_dir.mkdir(mode=0o700, exist_ok=True)

    async def address(self) -> str:
        return self._address

    async def tell(self, routers: Sequence[str]) -> None:
        """Write the routers' addresses into the file that the worker watches."""
        _write_routers(self._run_dir, routers)

    async def stop(self) -> None:
        """Let the process drain and end."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    async def run(self, section: dict[str, Any], routers: Sequence[str]) -> int:
        """Run the process until it ends. Return its exit code."""
        _write_routers(self._run_dir, routers)
        own = {"host": self._address, "kv": {**section["kv"], "host": self._address}}
        own["routers"] = [f"file:{self._run_dir / 'routers'}"]
        words = write_process(self._run_dir, "worker", section | own, self._secrets)
        log = self._run_dir / "log"
        async with launched(None, *words, env=os.environ, log=log) as (process, reports):
            self._process = process
            code = await until_ended(process, asyncio.create_task(_ignore(reports)))
        if code == 0:
            shutil.rmtree(self._run_dir)
        return code


def _write_routers(run_dir: Path, addresses: Sequence[str]) -> None:
    partial = run_dir / ".routers"
    partial.write_text("\n".join(addresses) + "\n", encoding="utf-8")
    partial.replace(run_dir / "routers")


def _run_dir(name: str, rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"pdserve-{name}-node-{rank}"


async def _ignore(reports: asyncio.StreamReader) -> None:
    """Discard the reports of a process, which are in its log too. Unread, they would block it."""
    while await reports.readline():
        pass


async def _result(reference: Any) -> Any:
    """Await a Ray reference. It is awaitable but not a coroutine, which tasks require."""
    return await reference


async def _first(stopped: asyncio.Event, other: Any) -> None:
    """Wait until `other` is done or the stop is requested."""
    tasks = [asyncio.ensure_future(other), asyncio.ensure_future(stopped.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
