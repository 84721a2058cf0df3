"""A process that has imported vLLM and forks from itself what tests start: most of what an engine
needs to be ready is that import. What `warm.Warm` starts.

Each message in is a pickled Job with its file descriptors: standard output and error, a socket for
the answer, and those that the job is handed. The answer is the process id, with a descriptor of the
process, and when it has ended its exit code. When the socket closes, this process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import runpy
import select
import socket
import struct
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from workers import vllm_engine, vllm_env
from workers.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBER = struct.Struct("<i")
MESSAGE_BYTES = 1 << 17
_MOST_FDS = 8
# What an engine and a worker import until they are ready, by what imports all of it.
_MODULES = (
    "workers.vllm_core",
    "workers.cache_feed",
    "workers.server",
    "workers.main",
    "kv_transfer.vllm.connector",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


@dataclass(frozen=True, slots=True)
class Job:
    """`python -m module *args`, in an environment."""

    module: str
    args: tuple[str, ...]
    env: Mapping[str, str]


class _Parent:
    """State: the children that live, by a descriptor of each."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> Job | None:
        """Returns in each child with its job, and in this process with nothing, when it is to
        end."""
        while True:
            ready, _, _ = select.select([self._control, *self._children], [], [])
            for pidfd in self._children.keys() & ready:
                self._tell_end(pidfd)
            if self._control in ready:
                message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, _MOST_FDS)
                if not message:
                    return None
                if job := self._fork(pickle.loads(message), fds):
                    return job

    def _fork(self, job: Job, fds: list[int]) -> Job | None:
        out, err, answer, *handed = fds
        pid = os.fork()
        if pid:
            for fd in (out, err, *handed):
                os.close(fd)
            pidfd, told = os.pidfd_open(pid), socket.socket(fileno=answer)
            socket.send_fds(told, [NUMBER.pack(pid)], [pidfd])
            self._children[pidfd] = pid, told
            return None
        self._control.close()
        for pidfd, (_, told) in self._children.items():
            os.close(pidfd)
            told.close()
        for fd, target in ((out, 1), (err, 2)):
            os.dup2(fd, target)
            os.close(fd)
        os.close(answer)
        os.environ.clear()
        os.environ.update(job.env)
        return replace(job, args=(*job.args, *map(str, handed)))

    def _tell_end(self, pidfd: int) -> None:
        pid, told = self._children.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with told, contextlib.suppress(ConnectionError):
            told.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _import_vllm() -> None:
    """Imports, in the environment that an engine of the tests sets up before it does. An engine in
    a child sets it up again: of what it asks for, the import has settled the threads alone."""
    set_up = vllm_env.apply_environment
    os.environ.pop("OMP_NUM_THREADS")  # set for numpy, which has read it by now
    set_up(VllmSettings(str(Path.cwd()), "", threads=1))

    def apply_environment(settings: VllmSettings) -> None:
        assert settings.threads in (None, 1)
        imported = sys.modules.pop("vllm")  # it refuses once that is there
        set_up(settings)
        sys.modules["vllm"] = imported

    vllm_engine.apply_environment = apply_environment
    for name in _MODULES:
        importlib.import_module(name)
    threads = [(x / "comm").read_text() for x in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"a thread would be missing in what is forked: {threads}"


def _run(job: Job) -> NoReturn:
    """Ends as `python -m` does, but that what is imported is not taken apart first: that takes two
    seconds, and all memory goes with the process anyway."""
    sys.argv[1:] = job.args
    code: object = 0
    try:
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)
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


def _main(fd: int) -> None:
    _import_vllm()
    # No collection looks at what is imported, not those that vLLM makes when it ends, either.
    gc.freeze()
    gc.unfreeze = lambda: None
    job = _Parent(socket.socket(fileno=fd)).serve()
    if job is not None:
        _run(job)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
