"""One router or worker under a Ray actor.

The process is a child of the actor and not the actor itself: vLLM keeps its own event loop, signals
and garbage collector. When Ray kills the actor, the kernel kills the child (`local/child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.local.child import TAKE_REQUESTS
from pdserve.local.forkserver import launched, until_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.deploy.ray.spec import ProcessSpec

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_FORGIVEN_AFTER_S = 300.0  # a process that ran this long has no deaths
_PARTS_END_S = 15.0  # between the ends of two parts of a worker


class Host:
    """The actor. State: the child, what it reports, and whether it should run."""

    def __init__(self, name: str, spec: ProcessSpec) -> None:
        self._name, self._spec = name, spec
        self._address = ray.util.get_node_ip_address()
        self._run_dir = Path(tempfile.mkdtemp(prefix=f"pdserve-{name}-"))
        self._log = self._run_dir / "log"
        self._routers: list[str] = []
        self._warm = False
        self._has_routers = asyncio.Event()
        self._process: Any = None
        self._facts: dict[str, str] = {}
        self._node_id = ray.get_runtime_context().get_node_id()
        self._nodes = [self._address]
        self._doing, self._failure, self._lives, self._deaths = "starting", "", 0, 0
        # Why it ended before it was ever ready; None once it was.
        self._broken: str | None = ""
        self._ends_to_begin = False  # anew, as a worker that is warm, or no longer
        self._stopped = asyncio.Event()
        # The kernel kills the child when the thread that forked it ends: the event loop's thread
        # lives as long as the actor.
        self._keeper = asyncio.get_event_loop().create_task(self._keep())

    async def state(self) -> dict[str, Any]:
        """Return what `pdserve status --on ray` shows of this process."""
        return {
            "ready": bool(self._facts),
            "doing": self._doing,
            "failure": self._failure,
            "broken": self._broken or "",
            "node": ", ".join(self._nodes),
            "node_id": self._node_id,
            "pid": self._process.pid if self._process else 0,
            "actor_pid": os.getpid(),
            "lives": self._lives,
            "log": str(self._log),
            "routers": self._routers,
            "warm": self._warm,
            **self._facts,
        }

    async def grace(self) -> float:
        """Return the seconds that `stop` may take."""
        return self._spec.grace_s

    async def tell(self, addresses: Sequence[str], warm: bool) -> None:
        """Write the routers' addresses into the file that the worker watches. One that is `warm`
        is loaded and takes no requests; if it no longer is, it takes them at once."""
        partial = self._run_dir / ".routers"
        partial.write_text("\n".join(addresses) + "\n", encoding="utf-8")
        partial.replace(self._run_dir / "routers")
        self._routers = list(addresses)
        self._has_routers.set()
        if warm != self._warm:
            self._warm = warm
            if self._facts and not warm:
                self._doing = _doing_when_ready(warm)
                self._send(TAKE_REQUESTS)
            else:
                self._begin_anew()

    async def stop(self) -> None:
        """Drain the process and wait for its end; kill it after its grace. The log goes too."""
        self._stopped.set()
        self._send(signal.SIGTERM)
        await asyncio.wait((self._keeper,), timeout=self._spec.grace_s)
        self._keeper.cancel()  # kills the process, if there still is one
        await asyncio.wait((self._keeper,))
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def _begin_anew(self) -> None:
        """End the process, which starts again. It is told once: told twice, it would not drain."""
        if self._process is not None and not self._ends_to_begin:
            self._ends_to_begin, self._facts = True, {}
            self._doing = "starts anew"
            self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)

    async def _keep(self) -> None:
        """Run the process, and again when it ends, until it is stopped."""
        if self._spec.command == "worker":
            self._doing = "waiting for a router"
            await self._first(self._has_routers.wait())
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                code = await self._run()
            except (OSError, ValueError, ray.exceptions.RayError) as error:
                code, self._failure = 1, f"cannot start: {error}"
            if self._ends_to_begin:
                self._ends_to_begin = False
                continue
            if time.monotonic() - began >= _FORGIVEN_AFTER_S:
                self._deaths = 0
            self._deaths += 1
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._deaths - 1))
            self._doing = f"exit code {code}; restarted in {pause_s:g} s"
            if self._broken == "":
                self._broken = self._failure or f"exit code {code}, see {self._log}"
            if not self._stopped.is_set():
                await self._first(asyncio.sleep(pause_s))

    async def _first(self, other: Any) -> None:
        """Wait for `other` or for the stop."""
        tasks = [asyncio.ensure_future(other), asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self) -> int:
        """Run the process to its end, on all of its nodes, and return its exit code."""
        section, warm = self._section(), self._warm
        self._lives += 1
        self._doing = "starting"
        async with self._followers(section) as nodes:
            words = _command(self._run_dir, self._spec, {**section, **nodes})
            async with launched(None, *words, env=os.environ, log=self._log) as (process, reports):
                self._process = process
                following = asyncio.create_task(self._follow(reports))
                if self._stopped.is_set():
                    self._send(signal.SIGTERM)
                elif warm != self._warm:
                    self._begin_anew()
                try:
                    return await until_ended(process, following)
                finally:
                    self._process, self._facts = None, {}
                    following.cancel()

    @contextlib.asynccontextmanager
    async def _followers(self, section: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Start the process on the other nodes of a worker, if it has any. Yield how node 0 finds
        them. All end soon after one of them has ended, and their actors with this one."""
        count = self._spec.nnodes
        if count == 1:
            yield {}
            return
        group = ray.util.get_current_placement_group()
        actors = [
            ray.remote(Follower)
            .options(
                num_cpus=self._spec.cpus,
                num_gpus=self._spec.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            .remote(_run_dir(self._name, rank), self._spec)
            for rank in range(1, count)
        ]
        watching: asyncio.Task[None] | None = None
        try:
            self._doing = f"waiting for {count - 1} more nodes"
            addresses = asyncio.gather(*(_result(actor.address.remote()) for actor in actors))
            await self._first(addresses)
            if addresses.cancelled() or not addresses.done():
                raise OSError("stopped before its nodes were there")
            self._nodes = [self._address, *addresses.result()]
            with socket.create_server((self._address, 0)) as server:
                port = server.getsockname()[1]
            nodes = {"nnodes": count, "master_addr": self._address, "master_port": port}
            ends = [
                asyncio.create_task(_result(actor.run.remote({**section, **nodes}, rank)))
                for rank, actor in enumerate(actors, start=1)
            ]
            watching = asyncio.create_task(self._end_with(ends))
            yield nodes
            await asyncio.wait(ends, timeout=_PARTS_END_S)
        finally:
            if watching is not None:
                watching.cancel()
            self._nodes = [self._address]
            for actor in actors:
                ray.kill(actor)

    async def _end_with(self, others: Sequence[asyncio.Task[int]]) -> None:
        """Kill node 0 of a worker that goes on without another: it waits for it to join."""
        done, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        rank = others.index(done.pop()) + 1
        await asyncio.sleep(_PARTS_END_S)
        self._failure = f"its part on {self._nodes[rank]} ended, see {_run_dir(self._name, rank)}"
        self._send(signal.SIGKILL)

    def _section(self) -> dict[str, Any]:
        """Return the configuration with what depends on the node."""
        section, at = self._spec.section, self._address
        if self._spec.command == "router":
            return {**section, "http_host": at, "grpc_host": at}
        routers = [f"file:{self._run_dir / 'routers'}"]
        kv = {**section["kv"], "host": at}
        ours = {"worker_id": self._name, "host": at, "kv": kv, "routers": routers}
        return {**section, **ours, "warm": self._warm}

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Read what the process reports (`local/child.py`)."""
        while line := await reader.readline():
            report = json.loads(line)
            self._doing = report.get("doing", self._doing)
            self._failure = report.get("failed", self._failure)
            if "ready" in report:
                self._facts, self._failure = report["ready"], ""
                self._doing = _doing_when_ready(self._warm)
                self._broken = None


class Follower:
    """The actor of a part of a worker on another node than its first. It belongs to the actor of
    the first one, with which it ends."""

    def __init__(self, run_dir: Path, spec: ProcessSpec) -> None:
        self._run_dir, self._spec = run_dir, spec
        self._address: str = ray.util.get_node_ip_address()
        run_dir.mkdir(exist_ok=True)

    async def address(self) -> str:
        return self._address

    async def run(self, section: dict[str, Any], rank: int) -> int:
        """Run the process to its end, and return its exit code."""
        own = {"node_rank": rank, "host": self._address}
        own["kv"] = {**section["kv"], "host": self._address}
        words, log = _command(self._run_dir, self._spec, section | own), self._run_dir / "log"
        async with launched(None, *words, env=os.environ, log=log) as (process, reports):
            code = await until_ended(process, asyncio.create_task(_ignore(reports)))
        if code == 0:
            shutil.rmtree(self._run_dir)
        return code


def _run_dir(name: str, rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"pdserve-{name}-node-{rank}"


async def _ignore(reports: asyncio.StreamReader) -> None:
    """Read what the process reports: its log has it, too."""
    while await reports.readline():
        pass


async def _result(reference: Any) -> Any:
    """Await what Ray returns, which is no coroutine."""
    return await reference


def _command(directory: Path, spec: ProcessSpec, section: dict[str, Any]) -> list[str]:
    """Write the configuration of a process, and return the words that start it."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump({spec.command: section}), encoding="utf-8")
    return ["pdserve", spec.command, "--config", str(path)]


def _doing_when_ready(warm: bool) -> str:
    return "loaded, takes no requests" if warm else "serving"
