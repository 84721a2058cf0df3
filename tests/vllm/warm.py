"""Processes with vLLM that are forked from one that has imported it (warm_process.py)."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.patience import WAIT_S
from tests.vllm.warm_process import MESSAGE_BYTES, NUMBER, Job

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]


class Forked:
    """A process, used as asyncio's `Process` is, from one event loop. Released when it ends."""

    def __init__(self, pid: int, pidfd: int, answer: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._answer = answer
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(answer, self._read)

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._answer)
        with self._answer:
            data = self._answer.recv(NUMBER.size)
        os.close(self._pidfd)
        # Without an answer the process that it was forked from is gone, and nobody knows.
        (self.returncode,) = NUMBER.unpack(data) if data else (-signal.SIGKILL,)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError once it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """State: the process that has imported vLLM, from the first `start` to `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(
        self, module: str, *args: str, env: Mapping[str, str], fds: Sequence[int] = ()
    ) -> Forked:
        """`python -m module *args`; the numbers of `fds` over there follow `args`."""
        if self._control is None:
            self._control = self._open()
        job = pickle.dumps(Job(module, args, dict(env)))
        assert len(job) <= MESSAGE_BYTES
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [job], [1, 2, theirs.fileno(), *fds])
        data, (pidfd,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, NUMBER.size, 1)
        ours.setblocking(False)
        return Forked(*NUMBER.unpack(data), pidfd, ours)

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.warm_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                # Else numpy starts threads, which a fork does not take along.
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        return ours

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(WAIT_S)


# Set by a fixture (conftest.py) while tests that want it run.
shared: Warm | None = None


async def start_python(
    module: str, *args: str, env: Mapping[str, str] | None = None, fds: Sequence[int] = ()
) -> Process | Forked:
    """`python -m module *args` with more in its environment, forked where `shared` is there."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    if shared is not None:
        return await shared.start(module, *args, env=whole, fds=fds)
    command = [sys.executable, "-m", module, *args, *map(str, fds)]
    return await asyncio.create_subprocess_exec(*command, pass_fds=fds, cwd=ROOT, env=whole)
