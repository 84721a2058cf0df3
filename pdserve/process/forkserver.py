"""Fork server: starts processes as forks of a parent that has imported their modules.

Importing vLLM takes most of an engine's start. `ForkServer` starts the parent, `python -m
pdserve.process.forkserver PID FUNCTION ARGUMENT... FD`. The parent calls FUNCTION (module:name),
which imports the modules, and then forks one child for each request. A request is JSON (see
`_request`) with file descriptors: a socket for the replies, the log, and descriptors for the child,
whose numbers are appended to the child's arguments. The replies are the child's pid and its exit
code. In a forked process, the parent of a `ForkServer` is a fork too, which need not import these
modules again; and with `serve_forks` such a process forks a parent of its own. An executed process
may use a fork server, too (`new_client`, `use_server`). This is only how a process starts: calls to
one that has started are child_pool.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pdserve.process.child import die_with, exit_at_once
from pdserve.process.logs import MAX_LOG_BYTES, keep_rotating

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

_MAX_REQUEST_BYTES = 1 << 17
_MAX_ANSWER_BYTES = 32
_MAX_FDS = 8
_MAX_REPORT_BYTES = 1 << 20
_LAST_REPORTS_S = 1.0
# A fork copies neither threads nor a CUDA context: numpy must not start threads, and vLLM must not
# see a GPU. numpy's OpenBLAS reads its own variable first, which a worker with several cores has
# set.
_PARENT_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# jemalloc, which pyarrow loads, gives up its thread in a fork. CUDA has one once a package has
# initialized it, and what is forked on a machine with a GPU computes nothing there.
_NOT_MISSED = ("jemalloc_bg_thd", "cuda")

MODULE = "pdserve.process.forkserver"
_NEW_CLIENT = b"{}"  # a request with the socket of another client
_FORKED = "0"  # the argument of a forked parent in place of its creator's process id

# In a forked process: the socket for requests to the parent that forked it.
_own_server: socket.socket | None = None


class ForkFailed(Exception):
    """The parent process ended before it forked."""


class Forked:
    """A forked process with the methods of `asyncio.subprocess.Process` that callers need."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(answers, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._answers)
        with self._answers:
            self.returncode = exit_code_from(self._answers)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = asyncio.subprocess.Process | Forked


class _ForkedParent:
    """The parent of a ForkServer, forked by the parent of this process. Has the methods of
    `subprocess.Popen` that ForkServer needs."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self._pid, self._answers = pid, answers
        self._returncode: int | None = None

    def kill(self) -> None:
        # An answer is its exit code, after which the process id may be another process's.
        if self._returncode is None and not select.select([self._answers], [], [], 0)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._returncode is None:
            with self._answers:
                self._returncode = exit_code_from(self._answers)
        return self._returncode


class ForkServer:
    """Owns the parent process, from the first `start` to `close`."""

    def __init__(
        self, preload: str, log: Path | None = None, arguments: Sequence[str] = ()
    ) -> None:
        """`preload` is module:function, called with `arguments`; the parent writes to `log`."""
        self._preload = (preload, *arguments)
        self._log = log
        self._process: subprocess.Popen[bytes] | _ForkedParent | None = None
        self._control: socket.socket

    async def start(
        self,
        module: str,
        *args: str,
        env: Mapping[str, str],
        log: Path | None = None,
        fds: Sequence[int] = (),
    ) -> Forked:
        """Run `python -m module *args` in a fork that writes to `log`. Raises ForkFailed."""
        self.start_parent()
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("ab")).fileno() if log else None
            return await _start_fork(self._control, _ForkRequest(module, args, env, out, fds))

    def new_client(self) -> socket.socket:
        """Return a socket for another process, which uses it with `use_server`. Raises OSError if
        the parent process has ended."""
        self.start_parent()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [_NEW_CLIENT], [theirs.fileno()])
        return ours

    def start_parent(self) -> None:
        """Start the parent process, if it was not started. Forks wait until it has loaded."""
        if self._process is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._forked(theirs) or self._executed(theirs)

    def _executed(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        words = (str(os.getpid()), *self._preload, str(theirs.fileno()))
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log.open("ab")) if self._log else None
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, *words],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_PARENT_ENV},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _forked(self, theirs: socket.socket) -> _ForkedParent | None:
        """Fork the fork server of this process, if there is one."""
        if _own_server is None:
            return None
        words, env = (_FORKED, *self._preload), {**os.environ, **_PARENT_ENV}
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self._log.open("ab")).fileno() if self._log else 2
            try:
                fds = (theirs.fileno(),)
                return _ForkedParent(*fork_from(_own_server, MODULE, words, env, out, fds))
            except ForkFailed:  # this process ends with it
                return None

    def close(self) -> None:
        """Kill the parent. The kernel then kills every process that it forked."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()


class _ForkRequest(NamedTuple):
    """A fork that runs `python -m module *args`, and gets `fds`. `out`: where it writes, if not
    where the parent does. It requests no forks itself unless it `may_fork`."""

    module: str
    args: Sequence[str]
    env: Mapping[str, str]
    out: int | None
    fds: Sequence[int]
    may_fork: bool = True


@contextlib.contextmanager
def _requested(server: socket.socket, request: _ForkRequest) -> Iterator[socket.socket]:
    """Request a fork. Yield the socket that gets its process id, and later its exit code. Raises
    ForkFailed, and then closes the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        stack.callback(ours.close)
        try:
            with theirs:
                _request(server, theirs, request)
            yield ours
        except (OSError, ValueError) as error:
            raise ForkFailed("the parent process has ended") from error
        stack.pop_all()


async def _start_fork(server: socket.socket, request: _ForkRequest) -> Forked:
    with _requested(server, request) as answers:
        answers.setblocking(False)
        pid = int(await asyncio.get_running_loop().sock_recv(answers, _MAX_ANSWER_BYTES))
    return Forked(pid, answers)


def use_server(fd: int) -> None:
    """Let this process request forks at `fd`, which is of a `new_client` of another's ForkServer.
    Call it once."""
    global _own_server
    os.set_inheritable(fd, False)
    _own_server = socket.socket(fileno=fd)


async def start_own(module: str, *args: str, fds: Sequence[int]) -> Forked | None:
    """Run `python -m module *args` in a fork that may not fork others, because it reads what
    strangers sent, and that ends with this process. Return None without a fork server."""
    if _own_server is None:
        return None
    try:
        return await _start_fork(
            _own_server, _ForkRequest(module, args, os.environ, 2, fds, may_fork=False)
        )
    except ForkFailed:  # its modules could not be imported
        return None


def fork_from(
    server: socket.socket,
    module: str,
    args: Sequence[str],
    env: Mapping[str, str],
    out: int,
    fds: Sequence[int],
) -> tuple[int, socket.socket]:
    """Run `python -m module *args` in a fork of the parent at `server`, which writes to `out`.
    Return its pid, and the socket that gets its exit code (`exit_code_from`). Blocks until the
    fork. Raises ForkFailed."""
    with _requested(server, _ForkRequest(module, args, env, out, fds)) as answers:
        pid = int(answers.recv(_MAX_ANSWER_BYTES))
    return pid, answers


def exit_code_from(answers: socket.socket) -> int:
    """Return the exit code of a fork, once it has ended. If its parent ended before, the kernel
    killed it."""
    return int(answers.recv(_MAX_ANSWER_BYTES) or -signal.SIGKILL)


def serve_forks() -> socket.socket:
    """Fork this process, and return a socket for `fork_from`: each request forks the fork, as this
    process is now. The fork ends with this thread, or when the socket closes. Raises RuntimeError
    if this process has other threads, which a fork would miss."""
    global _own_server
    _check_has_one_thread()
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    if os.fork():
        theirs.close()
        return control
    die_with(parent_pid)
    if _own_server is not None:
        _own_server.close()
        _own_server = None
    # Peers of that process must see when it closes its sockets.
    for fd in [int(x.name) for x in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the one that listed this folder
            if fd not in (0, 1, 2, theirs.fileno()) and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
    request = _serve(theirs, is_forked=True)
    if request is not None:
        _run(request["module"], request["args"])
    os._exit(0)  # that process runs its own exit handlers


@contextlib.asynccontextmanager
async def launched(
    forkserver: ForkServer | None,
    module: str,
    *args: str,
    env: Mapping[str, str],
    log: Path,
    max_log_bytes: int = MAX_LOG_BYTES,
    its_forks: ForkServer | None = None,
) -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
    """Fork or execute `python -m module *args` with the options of `add_child_options`. Yield the
    process, which is killed at the end if it still runs, and its reports, a line of JSON each. Its
    log is rotated. One that is executed may use the fork server `its_forks`, by `--fork-fd`."""
    ours, theirs = socket.socketpair()
    reports, writer = await asyncio.open_connection(sock=ours, limit=_MAX_REPORT_BYTES)
    process: Process | None = None
    rotating = asyncio.create_task(keep_rotating(log, max_log_bytes))
    try:
        with theirs:
            words = (module, *args)
            process = await _start(forkserver, its_forks, words, env, log, theirs.fileno())
        yield process, reports
    finally:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        rotating.cancel()
        writer.close()


async def until_ended(process: Process, following: asyncio.Task[None]) -> int:
    """Return the exit code of a process, or minus the signal that ended it, once `following` has
    read its reports."""
    code = await process.wait()
    # A child of that process may still hold the socket open.
    await asyncio.wait((following,), timeout=_LAST_REPORTS_S)
    return code


async def _start(
    forkserver: ForkServer | None,
    its_forks: ForkServer | None,
    words: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    fd: int,
) -> Process:
    """Start a process in its own session, so that a terminal's Ctrl-C reaches only this one. The
    kernel kills it when this one ends."""
    if forkserver is not None:
        # Parent 0: the parent is the fork server, whatever its pid.
        own = ("--parent-pid", "0", "--report-fd")
        with contextlib.suppress(ForkFailed):
            return await forkserver.start(*words, *own, env=env, log=log, fds=(fd,))
    tie, fds = ["--parent-pid", str(os.getpid()), "--report-fd", str(fd)], [fd]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("ab"))
        if its_forks is not None:
            with contextlib.suppress(OSError):  # it has ended
                fds.append(stack.enter_context(its_forks.new_client()).fileno())
                tie += ["--fork-fd", str(fds[-1])]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *words,
            *tie,
            env=dict(env),  # uvloop, which Ray's actors run on, takes nothing else
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=fds,
            start_new_session=True,
        )


def _request(server: socket.socket, answers: socket.socket, request: _ForkRequest) -> None:
    """Ask the parent at `server` for a fork that runs on the cores of this process. Raises
    OSError."""
    logs = [] if request.out is None else [request.out]
    message = {
        "module": request.module,
        "args": request.args,
        "env": dict(request.env),
        "cores": sorted(os.sched_getaffinity(0)),
        "may_fork": request.may_fork,
        "has_log": bool(logs),
    }
    fds = [answers.fileno(), *logs, *request.fds]
    socket.send_fds(server, [json.dumps(message).encode()], fds)


# The parent process


def _serve(control: socket.socket, *, is_forked: bool) -> dict[str, Any] | None:
    """Fork until `control` closes. Return the request in each child, and None in the parent. A
    child can make requests too, if its own allows that and this parent is not `is_forked`, because
    the children of such a parent may read what strangers sent. A child ends with its client."""
    # By pidfd: the process id, the socket that gets the exit code, and the client's socket.
    children: dict[int, tuple[int, socket.socket, socket.socket]] = {}
    clients = {control.fileno(): control}
    while True:
        ready, _, _ = select.select([*clients, *children], [], [])
        for pidfd in children.keys() & ready:
            pid, answers, _ = children.pop(pidfd)
            os.close(pidfd)
            _answer(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            answers.close()
        for client in [x for fd, x in clients.items() if fd in ready]:
            message, fds, _, _ = socket.recv_fds(client, _MAX_REQUEST_BYTES, _MAX_FDS)
            if not message:
                if client is control:
                    return None
                _kill([pid for pid, _, its_client in children.values() if its_client is client])
                clients.pop(client.fileno()).close()
                continue
            if message == _NEW_CLIENT:
                clients[fds[0]] = socket.socket(fileno=fds[0])
                continue
            request: dict[str, Any] = json.loads(message)
            answers, handed = socket.socket(fileno=fds[0]), fds[1:]
            ours, own_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not (pid := os.fork()):
                for pidfd, (_, other, _) in children.items():
                    os.close(pidfd)
                    other.close()
                for each in (*clients.values(), answers, ours):
                    each.close()
                _set_own_server(own_server, is_usable=request["may_fork"] and not is_forked)
                return _become(request, handed)
            for fd in handed:
                os.close(fd)
            own_server.close()
            clients[ours.fileno()] = ours
            children[os.pidfd_open(pid)] = pid, answers, client
            _answer(answers, pid)


def _kill(pids: Sequence[int]) -> None:
    """Kill children that were not waited for, so that none is another's process."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _set_own_server(server: socket.socket, *, is_usable: bool) -> None:
    """Keep the socket in this module as others import it. This process runs it as `__main__`."""
    module: Any = importlib.import_module(MODULE)
    if module._own_server is not None:
        module._own_server.close()
    module._own_server = server if is_usable else None
    if not is_usable:
        server.close()


def _answer(answers: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client may have ended
        answers.send(b"%d" % number)


def _become(request: dict[str, Any], handed: list[int]) -> dict[str, Any]:
    """Take over the log, the environment and the file descriptors of `request` in the child."""
    os.setsid()
    os.sched_setaffinity(0, request["cores"])
    if request["has_log"]:
        log = handed.pop(0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    for fd in handed:
        os.set_inheritable(fd, True)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # TMPDIR may differ from the parent's
    request["args"] += map(str, handed)
    return request


def _run(module: str, args: list[str]) -> NoReturn:
    """Run the module as `python -m` does, and exit."""
    sys.argv[1:] = args
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        code = 1
    exit_at_once(code if isinstance(code, int) else 1)


def _check_has_one_thread() -> None:
    """Raise RuntimeError if there are other threads. Those of libraries that expect forks are no
    loss."""
    main = str(os.getpid())
    others = [x for x in Path("/proc/self/task").iterdir() if x.name != main]
    names = [(x / "comm").read_text().strip() for x in others]
    if missed := [name for name in names if not name.startswith(_NOT_MISSED)]:
        raise RuntimeError(f"a fork would miss the threads {missed}")


def _main(parent_pid: str, preload: str, *words: str) -> None:
    *arguments, fd = words
    die_with(int(parent_pid))
    os.environ.pop("OMP_NUM_THREADS")  # numpy has read it, and the engine sets its own
    module, _, name = preload.partition(":")
    gc.disable()  # collections while vLLM is imported take a quarter of the time, and free nothing
    getattr(importlib.import_module(module), name)(*arguments)
    _check_has_one_thread()
    # Garbage collections, including vLLM's, never visit imported objects.
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.enable()
    request = _serve(socket.socket(fileno=int(fd)), is_forked=parent_pid == _FORKED)
    if request is not None:
        _run(request["module"], request["args"])


if __name__ == "__main__":
    _main(*sys.argv[1:])
