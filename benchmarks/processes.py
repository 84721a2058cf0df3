"""A process that a benchmark starts. What it says goes to a file, and it does not outlive us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import psutil

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

READY_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 12
# Below those that the system takes for outgoing connections: while a server loads, nobody gets it.
_PORTS: Final = range(20_000, 32_000)
# The kernel ends it with us, whatever ends us; the signal's setting outlives the exec.
_PROGRAM: Final = (
    "import os, sys; from pdserve.child import die_with; die_with(int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


# Stops a process group for as long as somebody holds the other end of its input: should we die
# ourselves, the group goes on, and ends as it was told to.
_PAUSE: Final = 'kill -STOP -"$1" && echo stopped && cat >/dev/null; kill -CONT -"$1"'
_PAUSE_TIMEOUT_S: Final = 10.0


class Child:
    """Owns one process, in a session of its own, from :meth:`start` to :meth:`stop`."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pause: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start ``command``, with ``env`` over our own environment."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            # Not by the loop, whose fork gRPC's threads object to.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    async def until(
        self, is_ready: Callable[[], Awaitable[bool]], within_s: float = READY_TIMEOUT_S
    ) -> None:
        """Return once it is ready; raises :class:`BenchError` with what it said if it ends or is
        not in time."""
        try:
            async with asyncio.timeout(within_s):
                while not await is_ready():
                    if not self.is_alive:
                        raise BenchError(f"{self.name} did not start:\n{self.tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchError(
                f"{self.name} was not ready in {within_s:g} s:\n{self.tail()}"
            ) from None

    async def until_file(self, path: Path, within_s: float = READY_TIMEOUT_S) -> None:
        """The same, of a process that makes a file when it is ready."""
        look = path.exists

        async def is_there() -> bool:
            return look()

        await self.until(is_there, within_s)

    async def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Let it end in its own order, and kill it with what it started if it does not.
        Idempotent."""
        self.resume()
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(sign)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    while process.poll() is None:  # noqa: ASYNC110 - there is no event for it
                        await asyncio.sleep(_POLL_S)
        finally:
            if process.poll() is None:  # late, or we are in a hurry ourselves
                for each in _with_children([process.pid]):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait()

    def pause(self) -> None:
        """Stop it and what it started, until :meth:`resume`. Idempotent; raises
        :class:`BenchError`."""
        if self._pause is not None:
            return
        self._pause = subprocess.Popen(
            ["/bin/sh", "-c", _PAUSE, "sh", str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._pause.stdout is not None
        if self._pause.stdout.readline() != b"stopped\n":
            self.resume()
            raise BenchError(f"{self.name} could not be paused")

    def resume(self) -> None:
        """Let it go on. Idempotent."""
        pause, self._pause = self._pause, None
        if pause is not None:
            assert pause.stdin is not None
            assert pause.stdout is not None
            pause.stdin.close()
            pause.wait(_PAUSE_TIMEOUT_S)
            pause.stdout.close()

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Raises :class:`BenchError` where it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise BenchError(f"{self.name} ended:\n{self.tail()}")
        return self._process.pid

    def tail(self) -> str:
        """The last it said."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def free_port() -> int:
    """A port that was free a moment ago, for servers that cannot be told to take any."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def processor_s(pids: Iterable[int]) -> float:
    """Processor time of processes and what they started; one that is gone counts nothing."""
    total = 0.0
    for process in _with_children(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory of the same."""
    total = 0
    for process in _with_children(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += int(process.memory_info().rss)
    return total


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found
