"""Disposable processes for untrusted input of native code, such as grammars and images. A template
process imports their modules. It is forked for each input, in milliseconds, and never reads one
itself. A fork that dies or exceeds its limits fails only its own input.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pdserve.errors import Unavailable
from pdserve.process.child_pool import ChildFailed, ChildSlot
from pdserve.process.forkserver import ForkFailed, ForkServer

if TYPE_CHECKING:
    from pdserve.process.forkserver import Forked

# Half the stack of the engine's threads, so that input that a fork can read does not overflow
# theirs.
STACK_BYTES = 4 << 20
# Time to import vLLM and load the tokenizer, with a margin for a busy machine.
_START_S = 120.0


class ForkPool:
    """State: the template process."""

    def __init__(
        self, preload: str, module: str, config: bytes, *, at_once: int, timeout_s: float, task: str
    ) -> None:
        """`preload` is module:function. The template calls it with the path of a file that has
        `config`. Each fork runs `module`, which answers one call (child_pool.py). At most `at_once`
        forks run. `task`: their task, for errors."""
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

    async def run(self, data: bytes) -> bytes:
        """Return a fork's reply to `data`. Raises ChildFailed if that ended the fork, and
        Unavailable if no fork starts, or if it takes too long on a busy machine."""
        async with self._slots:
            try:
                return await ChildSlot(self._fork, timeout_s=self._timeout_s).call(data)
            except ChildFailed as error:
                if error.code != -signal.SIGKILL:  # by us, the kernel, or with its parent
                    raise
                text = f"the worker could not {self._task} now"
                raise Unavailable(text, retry_after_s=1.0) from None

    async def _fork(self, fd: int) -> Forked:
        self.start()
        forks = self._forks
        assert forks is not None
        options = ("--parent-pid", "0", "--socket")
        forking = forks.start(self._module, *options, env=os.environ, fds=(fd,))
        starting = asyncio.create_task(forking)
        try:
            async with asyncio.timeout(_START_S):
                return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The template reads no requests while it loads. Without slots, requests of clients that
            # leave would fill its socket, block this loop, and later all be forked at once.
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
