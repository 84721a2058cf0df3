"""One process of `pdserve up`: its log, its reports and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import yaml

from pdserve.local.forkserver import ForkFailed

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.local.display import Display
    from pdserve.local.forkserver import Forked, ForkServer
    from pdserve.local.specs import ProcessSpec

PROGRAM = (sys.executable, "-m", "pdserve")
_TAIL_LINES = 20
_MAX_LINE_BYTES = 1 << 20
_LAST_REPORTS_S = 1.0


class ChildProcess:
    """Owns one process. With `forkserver` it is forked from one that has imported vLLM.

    The process has its own session, so that a terminal's Ctrl-C reaches only the supervisor, and
    the kernel kills it when the supervisor ends. `ready` is set once it serves; `facts` has its
    addresses then. `ended` is set when it is gone.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        run_dir: Path,
        temporary_dir: str,
        display: Display,
        forkserver: ForkServer | None,
    ) -> None:
        self.spec = spec
        self.log_path = run_dir / f"{spec.name}.log"
        self.failure = ""
        self.facts: dict[str, str] = {}
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.ready_at = 0.0
        self._environment = {**os.environ, "TMPDIR": temporary_dir}
        self._config_path = run_dir / f"{spec.name}.yaml"
        self._display = display
        self._forkserver = forkserver
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._killed_by: signal.Signals | None = None  # before it existed

    @property
    def pid(self) -> int:
        """The process id, or 0 before the process exists."""
        return self._process.pid if self._process else 0

    async def run(self) -> int:
        """Start the process, wait for its end and return its exit code, or minus the signal."""
        self._config_path.write_text(yaml.safe_dump(self.spec.config, sort_keys=False))
        read_fd, write_fd = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = await self._launch(log.fileno(), write_fd)
        except BaseException:
            os.close(read_fd)
            self.ended.set()
            raise
        finally:
            os.close(write_fd)
        if self._process is None:
            os.close(read_fd)
            self.ended.set()
            return -(self._killed_by or signal.SIGKILL)
        if self._killed_by is not None:
            self.send(self._killed_by)
        reports = asyncio.create_task(self._read_reports(read_fd))
        try:
            code = await self._process.wait()
            # A process that this one forked may still hold the pipe open.
            await asyncio.wait((reports,), timeout=_LAST_REPORTS_S)
            return code
        finally:
            reports.cancel()
            await asyncio.wait((reports,))
            self.ended.set()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is alive."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        else:
            self._killed_by = number
            if self._forkserver is not None:
                self._forkserver.kill()

    def tail(self) -> list[str]:
        """Return the last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - 65536))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-_TAIL_LINES:]

    async def _launch(
        self, log_fd: int, report_fd: int
    ) -> asyncio.subprocess.Process | Forked | None:
        """Fork or execute the process. Return None if it was killed before that."""
        words = (self.spec.command, "--config", str(self._config_path))
        if self._forkserver is not None:
            self._display.doing(self.spec.name, "importing vLLM")
            try:
                # Parent 0: the parent is the fork server, whatever its pid.
                return await self._forkserver.start(
                    *("pdserve", *words, "--parent-pid", "0", "--report-fd"),
                    env=self._environment,
                    out=log_fd,
                    err=log_fd,
                    fds=(report_fd,),
                )
            except ForkFailed:
                if self._killed_by is not None:
                    return None
        return await asyncio.create_subprocess_exec(
            *(*PROGRAM, *words, "--parent-pid", str(os.getpid()), "--report-fd", str(report_fd)),
            env=self._environment,
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
                report = json.loads(line)
                if "doing" in report:
                    self._display.doing(self.spec.name, str(report["doing"]))
                if "failed" in report:
                    self.failure = str(report["failed"])
                if isinstance(report.get("ready"), dict):
                    self.facts = {str(k): str(v) for k, v in report["ready"].items()}
                    self.ready_at = time.monotonic()
                    self.ready.set()
        finally:
            transport.close()
