"""Tokens a second through router and worker, and from vLLM's AsyncLLM in process, in turn:

    python -m benchmarks.worker [--model demo|PATH] [--rounds 7] [--streams 32] [--json]

Both have the same model and engine settings, and one core for the engine, the same. What
drives it (router and client here, vLLM's front end there) may use all. Each round sends the same
fresh prompts to both at once, in alternating order; the ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from pdserve.client import Client
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READY_S = 180.0
ROUND_S = 120.0
STOP_S = 30.0
PROMPT_TOKENS, TOKENS = 64, 128
# All that either side would else choose by itself.
ENGINE_ARGS: dict[str, Any] = {
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
    "max_num_batched_tokens": 2048,
    "seed": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second, and the quotient."""

    pdserve: float
    in_process: float
    ratio: float
    load: float


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
            )
        if await self._line(READY_S) != "ready":
            raise BenchError(f"AsyncLLM did not start:\n{self._log.read_text()[-2000:]}")

    async def seconds(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """How long it takes to answer all of them at once."""
        assert self._process is not None
        assert self._process.stdin is not None
        asked = json.dumps({"prompts": prompts, "tokens": tokens})
        self._process.stdin.write(asked.encode() + b"\n")
        line = await self._line(ROUND_S)
        if not line:
            raise BenchError(f"AsyncLLM ended:\n{self._log.read_text()[-2000:]}")
        return float(line)

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


async def through_router(client: Client, prompts: Sequence[list[int]], tokens: int) -> float:
    """The same through router and worker."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    async def ask(prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in client.generate(prompt, sampling)])

    begun = time.monotonic()
    counts = await asyncio.gather(*map(ask, prompts))
    took_s = time.monotonic() - begun
    if set(counts) != {tokens}:
        raise BenchError(f"answers have {sorted(set(counts))} tokens, not {tokens}")
    return took_s


async def run(model: str, streams: int, rounds: int) -> list[Round]:
    """The rounds, a first one left out as warm-up."""
    arguments = {**ENGINE_ARGS, "max_num_seqs": streams}
    config = {
        "router": {"http_port": 0, "grpc_port": 0},
        "worker": {"model": model, "engine_args": arguments},
        "up": {"cores_per_worker": 1, "prefill": 0, "decode": 0, "aggregated": 1},
    }
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        stack = Stack("pdserve", config, directory / "pdserve")
        ending.push_async_callback(stack.stop)
        await stack.start()
        assert stack.ready is not None
        (worker,) = await stack.workers()
        (core,) = psutil.Process(stack.ready["workers"][0]["pid"]).cpu_affinity()
        settings = {"model": worker["model_path"], "engine_args": arguments, "core": core}
        peer = InProcess(settings, directory / "in_process.log")
        ending.push_async_callback(peer.stop)
        await peer.start()
        client = Client(stack.ready["grpc"])
        ending.push_async_callback(client.close)
        rng = random.Random(0)
        found = []
        for turn in range(rounds + 1):
            prompts = [
                [rng.randrange(16, worker["vocab_size"]) for _ in range(PROMPT_TOKENS)]
                for _ in range(streams)
            ]
            found.append(await one_round(client, peer, prompts, ours_first=bool(turn % 2)))
    return found[1:]


async def one_round(
    client: Client, peer: InProcess, prompts: Sequence[list[int]], *, ours_first: bool
) -> Round:
    """The same prompts to both, one after the other."""
    ours_s = await through_router(client, prompts, TOKENS) if ours_first else 0.0
    peer_s = await peer.seconds(prompts, TOKENS)
    ours_s = ours_s or await through_router(client, prompts, TOKENS)
    tokens = len(prompts) * TOKENS
    return Round(tokens / ours_s, tokens / peer_s, peer_s / ours_s, os.getloadavg()[0])


def show(rounds: Sequence[Round]) -> None:
    table = Table(title=f"tokens a second, answers of {TOKENS}, medians of {len(rounds)} rounds")
    for column in (
        "through router and worker",
        "AsyncLLM in process",
        "ratio",
        "its range",
        "load",
    ):
        table.add_column(column, justify="right")
    ratios = [x.ratio for x in rounds]
    table.add_row(
        f"{statistics.median(x.pdserve for x in rounds):.0f}",
        f"{statistics.median(x.in_process for x in rounds):.0f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        f"{statistics.median(x.load for x in rounds):.1f}",
    )
    Console().print(table)


def main() -> int:
    """Exit status 0 once everything was measured, 2 where an engine did not start."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="demo", help="demo or a model directory")
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON")
    options = parser.parse_args()
    try:
        rounds = asyncio.run(run(options.model, options.streams, options.rounds))
    except BenchError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 2
    if options.json:
        sys.stdout.write(json.dumps([asdict(x) for x in rounds]) + "\n")
    else:
        show(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
