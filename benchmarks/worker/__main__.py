"""Tokens a second through router and worker, and from vLLM's AsyncLLM in process, in turn:

    python -m benchmarks.worker [--model demo|PATH] [--rounds 6] [--streams 32] [--json]

Both have the same model and engine settings, and one core for the engine, the same. What
drives it (router and client here, vLLM's front end there) may use all. Each round sends the same
fresh prompts to each of both, in alternating order, and only once all processes of both have come
to rest; the ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from benchmarks.processes import processor_s
from benchmarks.report import stdout_console
from benchmarks.worker.peer import InProcess, engine_args
from pdserve.client import Client
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

# At rest both sides use less of a core than this, over so long.
REST_CORES, REST_WINDOW_S, REST_WITHIN_S = 0.08, 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of both."""

    model: str
    streams: int
    prompt_tokens: int
    tokens: int
    kv_cache_mib: int

    @property
    def engine_args(self) -> dict[str, Any]:
        """Of both engines."""
        return engine_args(self.kv_cache_mib, max_num_seqs=self.streams)


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second, and the quotient."""

    pdserve: float
    in_process: float
    ratio: float
    load: float
    ours_first: bool


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


async def run(case: Case, rounds: int) -> list[Round]:
    """The rounds, a first one left out as warm-up."""
    config = {
        # An engine on one core may take seconds for a step: that is no fault here.
        "router": {"http_port": 0, "grpc_port": 0, "detection": {"stall_s": 0}},
        "worker": {"model": case.model, "engine_args": case.engine_args},
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
        settings = {"model": worker["model_path"], "engine_args": case.engine_args, "core": core}
        peer = InProcess(settings, directory / "in_process.log")
        ending.push_async_callback(peer.stop)
        await peer.start()
        client = Client(stack.ready["grpc"])
        ending.push_async_callback(client.close)
        rest = partial(until_at_rest, [stack.pid, peer.pid])
        rng = random.Random(0)
        found = []
        for turn in range(rounds + 1):
            prompts = [
                [rng.randrange(16, worker["vocab_size"]) for _ in range(case.prompt_tokens)]
                for _ in range(case.streams)
            ]
            rest = partial(until_at_rest, [stack.pid, peer.pid])
            first = bool(turn % 2)
            found.append(
                await one_round(client, peer, prompts, case.tokens, rest, ours_first=first)
            )
    return found[1:]


async def one_round(
    client: Client,
    peer: InProcess,
    prompts: Sequence[list[int]],
    tokens: int,
    rest: Callable[[], Awaitable[None]],
    *,
    ours_first: bool,
) -> Round:
    """The same prompts to both, one after the other, each after a `rest`."""

    async def ours() -> float:
        await rest()
        return await through_router(client, prompts, tokens)

    ours_s = await ours() if ours_first else 0.0
    await rest()
    peer_s = await peer.seconds(prompts, tokens)
    ours_s = ours_s or await ours()
    made = len(prompts) * tokens
    return Round(made / ours_s, made / peer_s, peer_s / ours_s, os.getloadavg()[0], ours_first)


async def until_at_rest(pids: Sequence[int]) -> None:
    """Return once these processes and what they started have nothing to do. Raises BenchError."""
    try:
        async with asyncio.timeout(REST_WITHIN_S):
            used_s = math.inf
            while used_s > REST_CORES * REST_WINDOW_S:
                before_s = processor_s(pids)
                await asyncio.sleep(REST_WINDOW_S)
                used_s = processor_s(pids) - before_s
    except TimeoutError:
        raise BenchError(
            f"after {REST_WITHIN_S:g} s without work the processes still use "
            f"{used_s / REST_WINDOW_S:.2f} cores"
        ) from None


def show(case: Case, rounds: Sequence[Round]) -> None:
    title = f"tokens a second, answers of {case.tokens}, medians of {len(rounds)} rounds"
    table = Table(title=title)
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
    stdout_console().print(table)


def main() -> int:
    """Exit status 0 once everything was measured, 2 where an engine did not start."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="demo", help="demo or a model directory")
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument(
        "--kv-cache-mib", type=int, default=512, help="of either engine (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON")
    options = parser.parse_args()
    case = Case(
        options.model,
        options.streams,
        options.prompt_tokens,
        options.tokens,
        options.kv_cache_mib,
    )
    try:
        rounds = asyncio.run(run(case, options.rounds))
    except BenchError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 2
    if options.json:
        sys.stdout.write(json.dumps([asdict(x) for x in rounds]) + "\n")
    else:
        show(case, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
