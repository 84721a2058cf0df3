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
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml

from pdserve.local.child import TAKE_REQUESTS
from pdserve.local.forkserver import launched, until_ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.deploy.ray.spec import ProcessSpec

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_FORGIVEN_AFTER_S = 300.0  # a process that ran this long has no deaths


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
            "node": self._address,
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
            except (OSError, ValueError) as error:
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
        """Run the process to its end, and return its exit code."""
        config = self._run_dir / "config.yaml"
        config.write_text(yaml.safe_dump({self._spec.command: self._section()}), encoding="utf-8")
        warm = self._warm
        self._lives += 1
        self._doing = "starting"
        words = ("pdserve", self._spec.command, "--config", str(config))
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


def _doing_when_ready(warm: bool) -> str:
    return "loaded, takes no requests" if warm else "serving"
