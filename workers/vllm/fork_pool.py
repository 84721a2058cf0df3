"""Disposable processes for input of strangers that native code reads, such as grammars and images.

A template process imports what they need. It is forked for each input, in milliseconds, and never
reads one itself. A fork that dies or exceeds its limits fails its own input only.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pdserve.errors import Unavailable
from pdserve.process.forkserver import ForkFailed, ForkServer

if TYPE_CHECKING:
    from pdserve.process.forkserver import Forked

# Time to import vLLM and load the tokenizer, with a margin for a busy machine.
_START_S = 120.0
# Half the stack of the engine's threads: what a fork can read does not overflow there.
_STACK_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


class ForkDied(Exception):
    """A fork ended without an answer. `code`: its exit code, or minus the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ForkPool:
    """State: the template process."""

    def __init__(
        self, preload: str, module: str, config: bytes, *, at_once: int, timeout_s: float, task: str
    ) -> None:
        """`preload` is module:function. The template calls it with the path of a file that has
        `config`. A fork then runs `module` with the number of a socket: it reads the input from it,
        up to the end, and sends the answer (`send`). At most `at_once` forks run. `task` is what
        they do, for errors."""
        self._preload, self._module, self._config = preload, module, config
        self._timeout_s, self._task = timeout_s, task
        self._files = TemporaryDirectory(prefix="pdserve-forks-")
        self._forks: ForkServer | None = None
        self._slots = asyncio.Semaphore(at_once)

    def start(self) -> None:
        """Start the template process, if it does not run. It loads in the background."""
        if self._forks is None:
            path = Path(self._files.name, "config")
            path.write_bytes(self._config)
            self._forks = ForkServer(self._preload, arguments=(str(path),))
            self._forks.start_parent()

    async def run(self, data: bytes, *, max_answer_bytes: int) -> bytes:
        """Return a fork's answer to `data`. Raises ForkDied, and Unavailable if no fork starts, or
        if it takes too long on a busy machine."""
        async with self._slots:
            ours, theirs = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                with theirs:
                    process = await self._fork(theirs.fileno())
                return await self._ask(process, reader, writer, data, max_answer_bytes)
            finally:
                writer.close()

    async def _ask(
        self,
        process: Forked,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        data: bytes,
        max_answer_bytes: int,
    ) -> bytes:
        code: int | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    writer.write(data)
                    writer.write_eof()
                    return await _read(reader, max_answer_bytes)
                code = await process.wait()
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        if code is None or code == -signal.SIGKILL:  # by the kernel, or with its parent
            raise Unavailable(f"the worker could not {self._task} now", retry_after_s=1.0)
        raise ForkDied(code)

    async def _fork(self, fd: int) -> Forked:
        self.start()
        forks = self._forks
        assert forks is not None
        starting = asyncio.create_task(forks.start(self._module, env=os.environ, fds=(fd,)))
        try:
            async with asyncio.timeout(_START_S):
                return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The template reads no requests while it loads. Without a slot, those of clients that
            # leave would fill its socket and block this loop, and all be forked at once.
            await asyncio.wait((starting,), timeout=_START_S)
            if not starting.cancel() and starting.exception() is None:
                with suppress(ProcessLookupError):
                    starting.result().kill()
            raise
        except (ForkFailed, TimeoutError):
            starting.cancel()
            if self._forks is forks:  # the next input starts another template
                self._forks = None
                forks.close()
            text = f"the process to {self._task} did not start; see the worker's log"
            raise Unavailable(text, retry_after_s=1.0) from None

    def close(self) -> None:
        """End the template and all forks. Idempotent."""
        if self._forks is not None:
            self._forks.close()
        self._files.cleanup()


def send(sock: socket.socket, answer: bytes) -> None:
    """Send the answer of this fork. Its length comes first, so that a part is no answer."""
    sock.sendall(_LENGTH.pack(len(answer)) + answer)


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    """Return what a fork sends. Raises IncompleteReadError if it dies, and ConnectionError above
    `most` bytes."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > most:
        raise ConnectionError("the answer of a fork is too long")
    return await reader.readexactly(size)


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit the memory beyond that of now, the CPU time and the stack of this fork."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, used + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),  # then SIGXCPU
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    threading.stack_size(_STACK_BYTES)
