"""The spare process that makes compiled code while a service runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING

import psutil
import yaml
from msgspec.structs import replace

from pdserve.config import TiersConfig, to_mapping
from pdserve.deploy.local.compiled_code import Record
from pdserve.deploy.local.restarts import death_reason
from pdserve.process.forkserver import until_ended
from pdserve.process.memory import ENGINE_BYTES, free_bytes, weights_bytes
from pdserve.security.local import write_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pdserve.config import WorkerConfig
    from pdserve.deploy.local.compiled_code import CodeRecords, ModelCode
    from pdserve.deploy.local.display import Display
    from pdserve.deploy.local.launcher import Launcher

_LIMIT_S = 3600.0  # for one code, with the wait for another service
_LOOK_S = 1.0
# Beside the engine: torch's compiler, and the C++ compiler.
_COMPILER_BYTES = 3 << 29
_BAD_CONFIG = 2


class _Process:
    """One run of the process: what it has reported."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.failure = ""

    async def follow(self, reports: asyncio.StreamReader) -> None:
        while line := await reports.readline():
            report = json.loads(line)
            self.failure = report.get("failed", self.failure)
            self.files = report.get("ready", {}).get("files", self.files)


class SpareCompiler:
    """Makes the missing codes of a service, one after the other."""

    def __init__(
        self, records: CodeRecords, launcher: Launcher, display: Display, run_dir: Path
    ) -> None:
        self._records, self._launcher, self._display = records, launcher, display
        self._config, self._log = run_dir / "compiler.yaml", run_dir / "compiler.log"

    async def make(
        self,
        models: Iterable[ModelCode],
        workers: Mapping[str, WorkerConfig],
        reserved_bytes: int,
    ) -> None:
        """Make the codes, and tell the operator. `workers` of the service by name.
        `reserved_bytes`: memory that they may still fill. Cancelled, it leaves no process."""
        for code in models:
            for key in code.missing:
                try:
                    async with asyncio.timeout(_LIMIT_S), self._records.turn():
                        why = await self._made(key, workers[code.codes[key]], reserved_bytes)
                except TimeoutError:
                    why = f"not within {_LIMIT_S / 60:g} min"
                except OSError as error:
                    why = str(error)
                text = f"compiled code is not made: {why}" if why else "compiled code is made"
                self._display.tell(f"{code.model}: {text}")

    async def _made(self, key: str, worker: WorkerConfig, reserved_bytes: int) -> str:
        """Return why the code is not made, or ""."""
        if self._records.look(key).files:
            return ""  # by another service
        needs = weights_bytes(worker.model) + ENGINE_BYTES + _COMPILER_BYTES
        if (free := free_bytes() - reserved_bytes) < needs:
            return f"it takes {needs / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"
        kv = replace(worker.kv, tiers=TiersConfig())  # it has no prompts to keep
        mapping = to_mapping(replace(worker, compilation="compiled", kv=kv))
        content = yaml.safe_dump({"worker": mapping}, sort_keys=False)
        write_private(self._config, content)
        for purpose in ("make", "check"):
            process = _Process()
            code = await self._run(process, purpose, needs)
            if code == _BAD_CONFIG:
                self._records.write(key, Record(refused=process.failure))
            if code or process.failure or not process.files:
                return death_reason(code, process.failure, self._log)
        self._records.write(key, Record(process.files))
        return ""

    async def _run(self, process: _Process, purpose: str, most_bytes: int) -> int:
        """Run the process to its end, or until it has too much memory. Return its exit code."""
        launched = self._launcher.launched(self._log, self._config, is_worker=True, code=purpose)
        async with launched as (running, reports):
            following = asyncio.create_task(process.follow(reports))
            ending = asyncio.create_task(until_ended(running, following))
            try:
                while not (await asyncio.wait((ending,), timeout=_LOOK_S))[0]:
                    if (used := _memory_of(running.pid)) > most_bytes:
                        process.failure = f"it took {used / 2**30:.1f} GiB of memory"
                        return 1
                return ending.result()
            finally:
                if running.returncode is None:  # also the C++ compiler, in the same session
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(running.pid, signal.SIGKILL)
                following.cancel()
                ending.cancel()


def _memory_of(pid: int) -> int:
    """Return the bytes of memory of a process and its children."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
    return total
