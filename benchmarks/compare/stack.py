"""A `pdserve up` started for a comparison: its addresses, its settings, its processor time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import psutil
import yaml

from benchmarks.errors import BenchError
from pdserve import rpc, wire
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

READY_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
LIST_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 12
# The kernel ends it with us, whatever ends us.
_PROGRAM: Final = (
    "import importlib, sys; from pdserve.child import die_with; die_with(int(sys.argv.pop(1))); "
    "sys.exit(importlib.import_module(sys.argv.pop(1)).main())"
)


class Stack:
    """Owns one `pdserve up` from :meth:`start` to :meth:`stop`; its files are in ``directory``.

    ``ready`` is the ready file's content, None while it does not serve. ``module``'s ``main`` is
    what runs: the command line.
    """

    def __init__(
        self, name: str, config: Mapping[str, Any], directory: Path, *, module: str = "pdserve.cli"
    ) -> None:
        self.name = name
        self._module = module
        self.ready: Mapping[str, Any] | None = None
        self._directory = directory
        self._ready_path = directory / "ready.json"
        up = {**config["up"], "ready_file": str(self._ready_path), "run_dir": str(directory)}
        self._config = {**config, "up": up}
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Return once it serves; raises :class:`BenchError` with what it said if it does not."""
        self._directory.mkdir(parents=True, exist_ok=True)
        config_path = self._directory / "up.yaml"
        config_path.write_text(yaml.safe_dump(self._config, sort_keys=False), encoding="utf-8")
        self._ready_path.unlink(missing_ok=True)
        with self._log_path.open("wb") as log:
            # Not by the loop, whose fork gRPC's threads object to.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [
                    *(sys.executable, "-c", _PROGRAM, str(os.getpid()), self._module),
                    *("up", "--config", config_path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not self._ready_path.exists():
                    if self._process.poll() is not None:
                        raise BenchError(f"{self.name} did not start:\n{self._tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchError(
                f"{self.name} was not ready in {READY_TIMEOUT_S:g} s:\n{self._tail()}"
            ) from None
        self.ready = self._read_ready()

    async def stop(self) -> None:
        """Let it end in its own order, and kill it if it does not. Idempotent."""
        process, self._process, self.ready = self._process, None, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    while process.poll() is None:  # noqa: ASYNC110 - there is no event for it
                        await asyncio.sleep(_POLL_S)
        finally:
            # Late, or we are in a hurry ourselves; without effect on one that has ended.
            process.kill()
            process.wait()

    async def workers(self) -> list[dict[str, Any]]:
        """What each worker says of itself, as :func:`benchmarks.compare.settings.settings_of`
        takes it; raises :class:`BenchError`."""
        assert self.ready is not None
        async with rpc.open_channel(self.ready["grpc"]) as channel:
            try:
                listed = await RegistryStub(channel).ListWorkers(
                    worker_pb2.ListWorkersRequest(), timeout=LIST_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                raise BenchError(f"{self.name} does not tell its workers: {error.code()}") from None
        found = [wire.worker_from_pb(entry.info) for entry in listed.workers]
        return [
            {
                "role": info.role.value,
                "engine": info.engine,
                "model": info.model.name,
                "model_path": info.model.path,
                "max_model_len": info.model.max_model_len,
                "vocab_size": info.model.vocab_size,
                "dtype": info.model.dtype,
                "block_size": info.block_size,
                "total_blocks": info.total_blocks,
                "max_num_seqs": info.max_num_seqs,
                "settings": dict(info.settings),
            }
            for info in found
        ]

    @property
    def pid(self) -> int:
        """Of `pdserve up`; raises :class:`BenchError` where it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise BenchError(f"{self.name} ended:\n{self._tail()}")
        return self._process.pid

    def changed(self) -> str | None:
        """What happened to its processes since it was ready; None if nothing did."""
        if self._process is None or self._process.poll() is not None:
            return f"{self.name} ended"
        if not self._ready_path.exists() or self._read_ready() != self.ready:
            return f"a process of {self.name} died and was started again"
        return None

    def router_s(self) -> float:
        """Processor time of the router so far."""
        assert self.ready is not None
        return _processor_s([self.ready["router"]["pid"]])

    def workers_s(self) -> float:
        """Processor time of all workers so far."""
        assert self.ready is not None
        return _processor_s(worker["pid"] for worker in self.ready["workers"])

    @property
    def _log_path(self) -> Path:
        return self._directory / "up.log"

    def _read_ready(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = json.loads(self._ready_path.read_text(encoding="utf-8"))
        return content

    def _tail(self) -> str:
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def _processor_s(pids: Iterable[int]) -> float:
    """Of processes and what they started; one that is gone counts nothing."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
    return total
