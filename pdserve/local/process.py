"""One process that `pdserve up` started: its log, its reports and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from pdserve.local.forkserver import ForkFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.local.forkserver import Forked, ForkServer
    from pdserve.local.specs import ProcessSpec

PROGRAM = (sys.executable, "-m", "pdserve")
_TAIL_LINES = 20
_MAX_LINE_BYTES = 1 << 20
_LAST_REPORTS_S = 1.0


@dataclass(frozen=True, slots=True)
class Doing:
    """What the process is doing while it starts."""

    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves. `facts` has its addresses."""

    name: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended. A negative code is the signal that killed it."""

    name: str
    code: int


ProcessEvent = Doing | Ready | Exited


class ChildProcess:
    """Owns one process from its start until it is reaped.

    The process has its own session, so that a terminal's Ctrl-C reaches only the supervisor, and
    the kernel kills it when the supervisor ends. With `forkserver` it is forked.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        run_dir: Path,
        on_event: Callable[[ProcessEvent], None],
        forkserver: ForkServer | None = None,
    ) -> None:
        self.spec = spec
        self.log_path = run_dir / f"{spec.name}.log"
        self.failure = ""
        self._config_path = run_dir / f"{spec.name}.yaml"
        self._on_event = on_event
        self._forkserver = forkserver
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._task: asyncio.Task[None] | None = None
        self._killed_by: signal.Signals | None = None  # before it was forked

    @property
    def pid(self) -> int:
        """The process id, or 0 before the process exists."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the process. Its end is reported as an Exited event."""
        self._config_path.write_text(yaml.safe_dump(self.spec.config, sort_keys=False))
        self._task = asyncio.create_task(self._run())

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is alive."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        elif self._forkserver is not None:
            self._killed_by = number
            self._forkserver.kill()

    async def reaped(self) -> None:
        """Return once the process is gone and its Exited event was reported."""
        if self._task is not None:
            await self._task

    def tail(self) -> list[str]:
        """Return the last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - 65536))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-_TAIL_LINES:]

    async def _run(self) -> None:
        read_fd, write_fd = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = await self._launch(log.fileno(), write_fd)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        if self._process is None:
            os.close(read_fd)
            self._on_event(Exited(self.spec.name, -(self._killed_by or signal.SIGKILL)))
            return
        reports = asyncio.create_task(self._read_reports(read_fd))
        try:
            code = await self._process.wait()
            # A process that this one forked may still hold the pipe open.
            await asyncio.wait((reports,), timeout=_LAST_REPORTS_S)
        finally:
            reports.cancel()
            await asyncio.wait((reports,))
        self._on_event(Exited(self.spec.name, code))

    async def _launch(
        self, log_fd: int, report_fd: int
    ) -> asyncio.subprocess.Process | Forked | None:
        """Fork or execute the process. Return None if it was killed before that."""
        words = (self.spec.command, "--config", str(self._config_path))
        if self._forkserver is not None:
            self._on_event(Doing(self.spec.name, "importing vLLM"))
            try:
                # The process takes its parent's pid from the kernel: it is the fork server's.
                return await self._forkserver.start(
                    *("pdserve", *words, "--parent-pid", "0", "--report-fd"),
                    env=os.environ,
                    out=log_fd,
                    err=log_fd,
                    fds=(report_fd,),
                )
            except ForkFailed:
                if self._killed_by is not None:
                    return None
        return await asyncio.create_subprocess_exec(
            *(*PROGRAM, *words, "--parent-pid", str(os.getpid()), "--report-fd", str(report_fd)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(report_fd,),
            start_new_session=True,
        )

    async def _read_reports(self, read_fd: int) -> None:
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        finally:
            transport.close()

    def _take(self, report: dict[str, object]) -> None:
        name = self.spec.name
        if "doing" in report:
            self._on_event(Doing(name, str(report["doing"])))
        if "failed" in report:
            self.failure = str(report["failed"])
        facts = report.get("ready")
        if isinstance(facts, dict):
            self._on_event(Ready(name, {str(k): str(v) for k, v in facts.items()}))
