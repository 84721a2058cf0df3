"""A `pdserve up` started for a comparison: its addresses, its settings, its processor time."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc.aio
import yaml

from benchmarks.errors import BenchError
from benchmarks.processes import Child
from pdserve import rpc, wire
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LIST_TIMEOUT_S: Final = 10.0


class Started(Protocol):
    """Processes that serve one arm. ``ready`` has their addresses and process ids, None while they
    do not serve."""

    ready: Mapping[str, Any] | None

    async def start(self) -> None:
        """Return once they serve; raises :class:`BenchError`."""
        ...

    async def stop(self) -> None:
        """End them. Idempotent."""
        ...

    async def workers(self) -> list[dict[str, Any]]:
        """What each worker says of itself; raises :class:`BenchError`."""
        ...

    async def changed(self) -> str | None:
        """What has happened to them that spoils what was measured; None if nothing did."""
        ...


class Stack:
    """Owns one `pdserve up` from :meth:`start` to :meth:`stop`; its files are in ``directory``.

    ``ready`` is the ready file's content, None while it does not serve. ``module`` is what runs:
    the command line.
    """

    def __init__(
        self, name: str, config: Mapping[str, Any], directory: Path, *, module: str = "pdserve"
    ) -> None:
        self.name = name
        self._module = module
        self.ready: Mapping[str, Any] | None = None
        self._directory = directory
        self._ready_path = directory / "ready.json"
        up = {**config["up"], "ready_file": str(self._ready_path), "run_dir": str(directory)}
        self._config = {**config, "up": up}
        self._child = Child(name, directory / "up.log")

    async def start(self) -> None:
        """Return once it serves; raises :class:`BenchError` with what it said if it does not."""
        self._directory.mkdir(parents=True, exist_ok=True)
        config_path = self._directory / "up.yaml"
        config_path.write_text(yaml.safe_dump(self._config, sort_keys=False), encoding="utf-8")
        self._ready_path.unlink(missing_ok=True)
        self._child.start([sys.executable, "-m", self._module, "up", "--config", str(config_path)])
        await self._child.until_file(self._ready_path)
        self.ready = self._read_ready()

    async def stop(self) -> None:
        """Let it end in its own order, and kill it if it does not. Idempotent."""
        self.ready = None
        await self._child.stop(signal.SIGINT)

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
        return self._child.pid

    async def changed(self) -> str | None:
        """What happened to its processes since it was ready; None if nothing did."""
        if not self._child.is_alive:
            return f"{self.name} ended"
        if not self._ready_path.exists() or self._read_ready() != self.ready:
            return f"a process of {self.name} died and was started again"
        return None

    def _read_ready(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = json.loads(self._ready_path.read_text(encoding="utf-8"))
        return content
