"""Child processes that answer calls: frames, deadlines, limits, and ends.

A call and its reply are one frame each (pdserve/net/framing.py) on a socket pair. A process sends
an empty frame when it is ready, and replies to calls in order, so if it dies or hangs, the oldest
call without a reply is the cause. `Child` is one process with any number of open calls. `ChildSlot`
makes one call at a time, and starts and ends processes as needed. A process reads its calls with
`connected` and `calls`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from pdserve.net import framing
from pdserve.process.child import die_with
from pdserve.process.forkserver import start_own

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from pdserve.process.forkserver import Process

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Starts a process with the options of `connected`, given its socket's descriptor.
Start = Callable[[int], Awaitable["Process"]]

_READ_BYTES = 1 << 18
_TICK_S = 0.5  # between checks of time limits
_EXIT_S = 2.0  # for a process that has closed its socket
_MAX_REPLY_BYTES = 128 << 20
_MAX_CALL_BYTES = (1 << 32) - 1  # a process trusts its parent


class End(StrEnum):
    """Why a process ended."""

    DIED = "died"
    HUNG = "did not reply in time"
    BROKE = "broke its protocol"


class ChildFailed(Exception):
    """A call has no reply. `code`: exit code of its process, or minus the signal that ended it,
    which is SIGKILL unless it `DIED` by itself."""

    def __init__(self, end: End, code: int) -> None:
        super().__init__(f"{end}, exit code {code}")
        self.end, self.code = end, code


class Child(asyncio.Protocol, Generic[T]):
    """One process. `ended` has the reason of its end. `due`: the tags and time limits of calls
    without a reply, oldest first; None is the start's. `is_ready`: it has read calls."""

    def __init__(self, on_reply: Callable[[T, bytes], None], *, start_s: float) -> None:
        """`on_reply` gets the tag and the reply of each call; an error in it ends the process."""
        self._loop = asyncio.get_running_loop()
        self.is_ready = False
        self.ended: asyncio.Future[End] = self._loop.create_future()
        self.due: deque[tuple[T | None, float]] = deque([(None, start_s)])
        self.process: Process | None = None
        self._on_reply = on_reply
        self._frames = framing.FrameParser(bytes, _MAX_REPLY_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    async def start(self, start: Start) -> None:
        """Start the process. Calls may be made before it is ready. Raises what `start` raises."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = await start(theirs.fileno())
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            await self.close()
            raise
        self._heard_at = self._loop.time()
        self._check()

    def call(self, tag: T, data: bytes, limit_s: float) -> None:
        """Send a call, unless the process has ended. It has hung if it replies to nothing for
        `limit_s`, once this is the oldest call; 0 for a call without a reply."""
        assert self._transport is not None
        if self.ended.done():
            return
        self._transport.write(framing.frame(data))
        if limit_s:
            if not self.due:
                self._heard_at = self._loop.time()
            self.due.append((tag, limit_s))
            if self._timer is None:
                self._timer = self._loop.call_later(_TICK_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if self.due and self._heard_at + self.due[0][1] < self._loop.time():
            self._end(End.HUNG)
        elif self.due:
            self._timer = self._loop.call_later(_TICK_S, self._check)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A check would fail: uvloop's transports have no base in asyncio.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for reply in self._frames.feed(data):
                tag, _ = self.due.popleft()
                if tag is not None:
                    self._on_reply(tag, reply)
                else:
                    self.is_ready = True
        except Exception:
            logger.exception("a reply of a child process")
            self._end(End.BROKE)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(End.DIED)

    def _end(self, end: End) -> None:
        if not self.ended.done():
            self.ended.set_result(end)

    def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()

    async def close(self) -> int:
        """End the process. Return its exit code. Idempotent."""
        if self.process is None:
            return 0
        if self.ended.done() and self.ended.result() is End.DIED:
            with suppress(TimeoutError):  # it may still exit with its own code
                async with asyncio.timeout(_EXIT_S):
                    await self.process.wait()
        self.kill()
        return await self.process.wait()


class ChildSlot:
    """Makes calls to a process, one at a time. A call starts the process if it does not run. State:
    the process, the number of its starts, and since when a call runs."""

    def __init__(
        self, start: Start, *, timeout_s: float, idle_s: float = 0.0, leave_s: float = 0.0
    ) -> None:
        """`timeout_s`: limit of a start, and of a call. The process ends `idle_s` after its last
        call; with 0, after each call. The call of a client that has left has `leave_s` to end, so
        that the process can be kept."""
        self._start, self._timeout_s = start, timeout_s
        self._idle_s, self._leave_s = idle_s, leave_s
        self._turn = asyncio.Lock()
        self._child: Child[asyncio.Future[bytes]] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._began = 0.0
        self.starts = 0

    @property
    def is_running(self) -> bool:
        """True if a call need not start the process, or another call does."""
        is_alive = self._child is not None and not self._child.ended.done()
        return is_alive or self._turn.locked()

    @property
    def running_s(self) -> float:
        """Seconds since the running call began; 0 without one."""
        return time.monotonic() - self._began if self._turn.locked() else 0.0

    async def call(self, data: bytes) -> bytes:
        """Return the reply. Raises ChildFailed, and what `start` raises."""
        async with self._turn:
            self._began = time.monotonic()
            child = await self._running_child()
            reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            child.call(reply, data, self._timeout_s)
            replied_or_ended = (reply, child.ended)
            code = 0
            try:
                await asyncio.wait(replied_or_ended, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await asyncio.wait((reply,), timeout=self._leave_s)
                raise
            finally:
                # The next call must not read this call's reply.
                if reply.done() and self._idle_s:
                    loop = asyncio.get_running_loop()
                    self._idle = loop.call_later(self._idle_s, child.kill)
                else:
                    code = await self.close()
            if reply.done():
                return reply.result()
            raise ChildFailed(child.ended.result(), code)

    async def _running_child(self) -> Child[asyncio.Future[bytes]]:
        if self._child is not None and self._child.ended.done():
            await self.close()
        if self._idle is not None:
            self._idle.cancel()
        if self._child is None:
            self.starts += 1
            child = Child(asyncio.Future[bytes].set_result, start_s=self._timeout_s)
            await child.start(self._start)
            self._child = child
        return self._child

    async def close(self) -> int:
        """End the process. Return its exit code. Idempotent."""
        if self._idle is not None:
            self._idle.cancel()
        child, self._child = self._child, None
        return 0 if child is None else await child.close()


async def execute(command: Sequence[str], fd: int) -> Process:
    """Start a process by its command."""
    options = ("--socket", str(fd), "--parent-pid", str(os.getpid()))
    return await asyncio.create_subprocess_exec(
        *command,
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(fd,),
        # OpenBLAS, which numpy loads, reserves memory for each thread that it could start.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


async def start_module(module: str, fd: int) -> Process:
    """Start a process that runs `module`: a fork, if this process may request one."""
    forked = await start_own(module, "--parent-pid", "0", "--socket", fds=(fd,))
    return forked or await execute((sys.executable, "-m", module), fd)


# The child's side


def connected(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, socket.socket]:
    """Parse the command line. Tie this process to its parent, and return the socket to it."""
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True, help="0 for any")
    args = parser.parse_args()
    die_with(args.parent_pid)
    return args, socket.socket(fileno=args.socket)


def calls(sock: socket.socket) -> Iterator[bytes]:
    """Report that this process is ready, and yield calls until the parent has ended."""
    frames = framing.FrameParser(bytes, _MAX_CALL_BYTES)
    reply(sock, b"")
    while data := sock.recv(_READ_BYTES):
        yield from frames.feed(data)


def reply(sock: socket.socket, data: bytes) -> None:
    """Reply to the oldest call."""
    sock.sendall(framing.frame(data))


def limit(memory_bytes: int, cpu_s: int = 0, stack_bytes: int = 0) -> None:
    """Limit the memory of this process beyond what it has now, its CPU time, and its stack. 0: no
    limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, used + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),  # then SIGXCPU
        (resource.RLIMIT_STACK, stack_bytes),
    ):
        if most:
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    threading.stack_size(stack_bytes)
