"""Ranks as forks of a worker that has vLLM loaded. Tested with vLLM 0.32.0
(vllm/v1/executor/multiproc_executor.py).

vLLM's executor spawns its ranks, and each imports vLLM again. The worker cannot fork them when it
loads its model: by then it has threads, and torch a pool of OpenMP, which do not survive a fork. So
the worker forks once while it has one thread, and its ranks are forks of that fork.
"""

from __future__ import annotations

import io
import os
import threading
from multiprocessing import context, popen_forkserver, spawn, util
from multiprocessing.connection import wait
from multiprocessing.reduction import dump
from multiprocessing.resource_tracker import getfd
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.executor import multiproc_executor

from pdserve.process.forkserver import exit_code_from, fork_from, serve_forks

if TYPE_CHECKING:
    import socket
    from multiprocessing.process import BaseProcess

_MODULE = "workers.vllm.ranks.rank_fork"


class _Popen(popen_forkserver.Popen):
    """Starts a process as multiprocessing's fork server does, by a request to ours."""

    method = "spawn"  # what the process uses for its own

    def __init__(self, server: socket.socket, started: BaseProcess) -> None:
        self._server = server
        self._fds: list[int] = []
        self._polling = threading.Lock()  # vLLM polls on several threads
        super().__init__(started)

    def _launch(self, started: BaseProcess) -> None:
        pickled = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            dump(spawn.get_preparation_data(started.name), pickled)
            dump(started, pickled)
        finally:
            context.set_spawning_popen(None)
        tracker = getfd()
        assert tracker is not None
        theirs, ours = os.pipe()
        try:
            fds = (theirs, tracker, *self._fds)
            forked = fork_from(self._server, _MODULE, (), os.environ, 2, fds)
            self.pid, self._answers = forked
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self.sentinel = self._answers.fileno()
        # The process sees the end of this one at the pipe.
        self.finalizer = util.Finalize(self, _close, (self._answers, ours))
        with open(ours, "wb", closefd=False) as pipe:
            pipe.write(pickled.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        with self._polling:
            limit_s = 0.0 if flag == os.WNOHANG else None
            if self.returncode is None and wait([self.sentinel], limit_s):
                self.returncode = exit_code_from(self._answers)
            return self.returncode

    def _send_signal(self, number: int) -> None:
        if self.poll() is None:  # else the process id may be another process's
            super()._send_signal(number)  # type: ignore[misc]


def _close(answers: socket.socket, pipe: int) -> None:
    answers.close()
    os.close(pipe)


class _RankProcess(context.SpawnProcess):
    """`server` is the socket of the fork that is forked."""

    server: ClassVar[socket.socket]

    @staticmethod
    def _Popen(started: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(_RankProcess.server, started)


class _Ranks(context.SpawnContext):
    Process = _RankProcess


def fork_ranks() -> None:
    """Make this process fork the ranks that vLLM's executor starts later. Call it once, on the main
    thread, before any other thread starts. Raises RuntimeError if there are others."""
    _RankProcess.server = serve_forks()
    multiproc_executor.get_mp_context = _Ranks
