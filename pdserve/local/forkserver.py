"""Fork processes from one that has imported vLLM already.

Most of the time until an engine is ready goes into that import. `ForkServer` starts the parent,
`python -m pdserve.local.forkserver FD FUNCTION`, which calls FUNCTION (module:name) to import
everything and then forks one child a request. A request is JSON ({"module", "args", "env"}) with
file descriptors: stdout, stderr, a socket for the answer, and those handed to the child, whose
numbers are appended to `args`. The answer is the child's pid with a pidfd, and later its exit code.
The parent ends when its socket closes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pdserve.local.child import die_with

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBER = struct.Struct("<i")
_MESSAGE_BYTES = 1 << 17
_MOST_FDS = 8


class ForkFailed(Exception):
    """The parent process ended before it forked."""


class Forked:
    """A forked process, with the interface of `asyncio.subprocess.Process` that we use."""

    def __init__(self, pid: int, pidfd: int, answer: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._answer = answer
        self._ended = asyncio.Event()
        answer.setblocking(False)
        asyncio.get_running_loop().add_reader(answer, self._read)

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._answer)
        with self._answer:
            data = self._answer.recv(_NUMBER.size)
        os.close(self._pidfd)
        # Without an answer the parent is gone, and the kernel killed this process with it.
        (self.returncode,) = _NUMBER.unpack(data) if data else (-signal.SIGKILL,)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Owns the parent process, from the first `start` to `close`."""

    def __init__(self, preload: str, *, log: Path | None = None, path: str = "") -> None:
        """`preload` is module:function; `path` becomes PYTHONPATH if it is given."""
        self._preload = preload
        self._log = log
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(
        self,
        module: str,
        *args: str,
        env: Mapping[str, str],
        out: int = 1,
        err: int = 2,
        fds: Sequence[int] = (),
    ) -> Forked:
        """Run `python -m module *args` in a fork. Raises ForkFailed."""
        if self._control is None:
            self._control = self._open()
        job = json.dumps({"module": module, "args": args, "env": dict(env)}).encode()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [job], [out, err, theirs.fileno(), *fds])
            data, pidfds, _, _ = await asyncio.to_thread(socket.recv_fds, ours, _NUMBER.size, 1)
        except OSError as error:
            ours.close()
            raise ForkFailed(str(error)) from error
        if not data:
            ours.close()
            raise ForkFailed("the parent process ended")
        (pid,) = _NUMBER.unpack(data)
        return Forked(pid, pidfds[0], ours)

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # numpy must not start threads here, because a fork does not copy them.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self._path:
            env["PYTHONPATH"] = self._path
        with theirs, contextlib.ExitStack() as stack:
            log = None if self._log is None else stack.enter_context(self._log.open("ab"))
            words = (str(theirs.fileno()), str(os.getpid()), self._preload)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdserve.local.forkserver", *words],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return ours

    def kill(self) -> None:
        """Kill the parent, and with it every process that it forked."""
        if self._process is not None:
            self._process.kill()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the parent. Its children must have ended."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(timeout_s)


# The parent process


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork until the socket closes. Return the job in each child, and None in the parent."""
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        waited: list[Any] = [control, *children]
        ready, _, _ = select.select(waited, [], [])
        for pidfd in children.keys() & ready:
            pid, answer = children.pop(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            with answer, contextlib.suppress(OSError):
                answer.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
        if control not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_FDS)
        if not message:
            return None
        pid = os.fork()
        if not pid:
            control.close()
            for pidfd, (_, answer) in children.items():
                os.close(pidfd)
                answer.close()
            return _become(json.loads(message), fds)
        out, err, answer_fd, *handed = fds
        for fd in (out, err, *handed):
            os.close(fd)
        pidfd, answer = os.pidfd_open(pid), socket.socket(fileno=answer_fd)
        children[pidfd] = pid, answer
        with contextlib.suppress(OSError):
            socket.send_fds(answer, [_NUMBER.pack(pid)], [pidfd])


def _become(job: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Take over the streams and the environment of `job` in the child."""
    out, err, answer, *handed = fds
    os.setsid()
    for fd, target in ((out, 1), (err, 2)):
        os.dup2(fd, target)
        os.close(fd)
    os.close(answer)
    for fd in handed:
        os.set_inheritable(fd, True)
    os.environ.clear()
    os.environ.update(job["env"])
    tempfile.tempdir = None  # TMPDIR may be another
    job["args"] += map(str, handed)
    return job


def _run(job: dict[str, Any]) -> NoReturn:
    """Run the module as `python -m` does, but end without tearing down the interpreter, which takes
    seconds."""
    sys.argv[1:] = job["args"]
    code: object = 0
    try:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _main(fd: str, parent_pid: str, preload: str) -> None:
    die_with(int(parent_pid))
    os.environ.pop("OMP_NUM_THREADS")  # numpy has read it; the engine sets its own
    module, _, name = preload.partition(":")
    getattr(importlib.import_module(module), name)()
    threads = [(x / "comm").read_text() for x in Path("/proc/self/task").iterdir()]
    if len(threads) != 1:
        raise RuntimeError(f"a fork would miss the threads {threads}")
    # No garbage collection walks what is imported, not even those that vLLM starts.
    gc.freeze()
    gc.unfreeze = lambda: None
    job = _serve(socket.socket(fileno=int(fd)))
    if job is not None:
        _run(job)


if __name__ == "__main__":
    _main(*sys.argv[1:])
