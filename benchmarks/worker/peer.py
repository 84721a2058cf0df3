"""vLLM's AsyncLLM in a process of its own, for benchmarks to compare with: no server before it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

READY_S = 180.0
ROUND_S = 300.0
STOP_S = 30.0
LINE_BYTES = 64 << 20  # one line holds the times of every token of a round


def engine_args(kv_cache_mib: int, max_num_seqs: int) -> dict[str, Any]:
    """All that either side would else choose by itself."""
    return {
        "block_size": 32,
        "kv_cache_memory_bytes": kv_cache_mib << 20,
        "enforce_eager": True,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 2048,
        "seed": 0,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }


class InProcess:
    """Owns the process of benchmarks/worker/in_process.py."""

    def __init__(self, settings: Mapping[str, Any], log: Path) -> None:
        self._settings = json.dumps(settings)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.worker.in_process", self._settings),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES,
            )
        if await self._line(READY_S) != "ready":
            raise BenchError(f"AsyncLLM did not start:\n{self._log.read_text()[-2000:]}")

    async def seconds(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """How long it takes to answer all of them at once."""
        return max(times[-1] for times in await self.times(prompts, tokens))

    async def times(self, prompts: Sequence[list[int]], tokens: int) -> list[list[float]]:
        """When each token of each answer came, in seconds from when all were asked at once."""
        assert self._process is not None
        assert self._process.stdin is not None
        asked = json.dumps({"prompts": prompts, "tokens": tokens})
        self._process.stdin.write(asked.encode() + b"\n")
        line = await self._line(ROUND_S)
        if not line:
            raise BenchError(f"AsyncLLM ended:\n{self._log.read_text()[-2000:]}")
        found: list[list[float]] = json.loads(line)
        return found

    @property
    def pid(self) -> int:
        """Of the process that drives the engine."""
        assert self._process is not None
        return self._process.pid

    async def stop(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _line(self, within_s: float) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                return (await self._process.stdout.readline()).decode().strip()
        except TimeoutError:
            raise BenchError(f"AsyncLLM said nothing for {within_s:g} s") from None
