"""How `pdserve up` starts a router or a worker: on vLLM, a worker is a fork, and a
router's parser process."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from pdserve.process.entry_points import PROCESSES, entry_point
from pdserve.process.forkserver import ForkServer, launched
from pdserve.process.gpus import is_cpu_build

if TYPE_CHECKING:
    import asyncio
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from pdserve.process.forkserver import Process


def vllm_forkserver(run_dir: Path) -> ForkServer | None:
    """Return a server that forks processes with vLLM imported: the import takes most of a worker's
    start. Return None on GPUs, because CUDA does not survive a fork."""
    if not is_cpu_build():
        return None
    preload = entry_point(PROCESSES, "vllm-preload").value
    return ForkServer(preload, run_dir / "forkserver.log")


class Launcher:
    """Owns the fork server, and the folder for temporary files of all processes, from the start to
    `close`."""

    def __init__(self, forkserver: ForkServer | None) -> None:
        """`forkserver`: for workers, or None to execute them."""
        self._forkserver = forkserver
        # vLLM leaves files in the temporary folder when it is killed.
        self._temporary_dir = tempfile.TemporaryDirectory(prefix="pdserve-tmp-")

    @property
    def imports_first(self) -> bool:
        """True if a worker may have to wait for the fork server's imports."""
        return self._forkserver is not None

    def launched(
        self, log: Path, config: Path, *, is_worker: bool, code: str = ""
    ) -> AbstractAsyncContextManager[tuple[Process, asyncio.StreamReader]]:
        """Run a process with a configuration file: see `forkserver.launched`. A router is executed,
        and has its parser process forked. `code`: what a worker does with compiled code, as in its
        option."""
        words = ["pdserve", "worker" if is_worker else "router", "--config", str(config)]
        words += ["--code", code] if code else []
        env = {**os.environ, "TMPDIR": self._temporary_dir.name}
        if is_worker:
            return launched(self._forkserver, *words, env=env, log=log)
        return launched(None, *words, env=env, log=log, its_forks=self._forkserver)

    def close(self) -> None:
        if self._forkserver is not None:
            self._forkserver.close()
        self._temporary_dir.cleanup()
