"""One process that `pdserve up` started: its log, its reports, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.up.specs import ProcessSpec

# What a process runs, before the name of its command.
PROGRAM = (sys.executable, "-m", "pdserve")
TAIL_LINES = 20
_MAX_LINE_BYTES = 1 << 20
_LAST_REPORTS_S = 1.0


@dataclass(frozen=True, slots=True)
class Doing:
    """The process says what it is at."""

    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves; `facts` are what it says of itself."""

    name: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended; a code below 0 is the signal that killed it."""

    name: str
    code: int


ProcessEvent = Doing | Ready | Exited


class ChildProcess:
    """Owns one process from its start to its reaping.

    It has a session of its own, so that a terminal's Ctrl-C reaches the supervisor alone, and is
    killed by the kernel when the supervisor ends in whatever way.
    """

    def __init__(
        self, spec: ProcessSpec, run_dir: Path, on_event: Callable[[ProcessEvent], None]
    ) -> None:
        self.spec = spec
        self.log_path = run_dir / f"{spec.name}.log"
        self.failure = ""
        self._config_path = run_dir / f"{spec.name}.yaml"
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before it was started."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process; its end is reported as an Exited event."""
        self._config_path.write_text(yaml.safe_dump(self.spec.config, sort_keys=False))
        read_fd, write_fd = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(*PROGRAM, self.spec.command, "--config", str(self._config_path)),
                    *("--report-fd", str(write_fd), "--parent-pid", str(os.getpid())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._task = asyncio.create_task(self._watch(self._process, read_fd))

    def send(self, number: signal.Signals) -> None:
        """Signal this process, if it lives."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def reaped(self) -> None:
        """Return once the process is gone and its Exited event was given."""
        if self._task is not None:
            await self._task

    def tail(self) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - 65536))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return list(deque((x for x in lines if x.strip()), maxlen=TAIL_LINES))

    async def _watch(self, process: asyncio.subprocess.Process, read_fd: int) -> None:
        reports = asyncio.create_task(self._read_reports(read_fd))
        try:
            code = await process.wait()
            # What it wrote last is in the pipe; a process that it forked may hold that open.
            await asyncio.wait((reports,), timeout=_LAST_REPORTS_S)
        finally:
            reports.cancel()
            await asyncio.wait((reports,))
        self._on_event(Exited(self.spec.name, code))

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
