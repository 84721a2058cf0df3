"""How long an update of weights stops a stream, beside one engine's own reload.

The service is 1P1D. Each round updates it (mode `keep`) while an answer is streamed, and reports
the longest time between two of its tokens. The baseline is one vLLM engine alone: the time of its
reload of the same files, plus two decode steps. Without --model it serves a Llama of 205 million
random parameters. `prompt of an engine` is the part of a stop that computes the answer's prompt
again; its tokens so far come in addition.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError
from benchmarks.micro.serving import serving
from benchmarks.micro.unloaded import make_model
from benchmarks.stats import alternate, compare
from pdserve.model.weight_deltas import WeightFiles
from pdserve.net import rpc
from pdserve.types import SamplingParams
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub
from workers.engine import AggregatedPhase, Work
from workers.vllm.engine import VllmEngine
from workers.vllm.start.settings import VllmSettings

if TYPE_CHECKING:
    import argparse

    from benchmarks.micro.serving import Serving
    from benchmarks.progress import Progress

SERVICE, ENGINE, PROMPT = "1P1D", "engine", "prompt"
_STEPS: Final = 2.0
_LOADS_S: Final = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="", metavar="DIR", help="a directory of safetensors files"
    )
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="its tokens (64)")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="an answer (200)")
    parser.add_argument(
        "--stale-kv", choices=("recompute", "allow"), default="recompute", help="of the service"
    )


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-")))
        path = Path(args.model) if args.model else make_model(directory / "llama-205m")
        engine_args = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 8}
        worker = {
            "model": str(path),
            "engine_args": engine_args,
            "weights_directories": [str(path.parent)],
        }
        router: dict[str, Any] = {
            "access": {"open_control": True},  # the service is reached from this machine alone
            "weights": {
                "directories": [str(path.parent)],
                "mode": "keep",
                "stale_kv": args.stale_kv,
            },
        }
        up: dict[str, Any] = {"prefill": {"workers": 1}, "decode": {"workers": 1}}
        progress.step("starting 1P1D and an engine")
        starting = serving(
            SERVICE, directory / SERVICE, worker, up | {"cores_per_worker": 1}, **router
        )
        served = await ending.enter_async_context(starting)
        engine = VllmEngine(VllmSettings(str(path), ("m",), threads=1, engine_args=engine_args))
        ending.push_async_callback(engine.close)
        await engine.start()

        async def measure(variant: str, number: int) -> float:
            progress.step(f"round {number + 1} of {args.rounds}, {variant}")
            if variant == SERVICE:
                return await _stop_ms(served, path, args)
            return await _engine_ms(engine, path, number, args, is_update=variant == ENGINE)

        variants = [SERVICE, ENGINE, PROMPT]
        rounds = [x async for x in alternate(variants, args.rounds, measure)]
    found = compare(rounds, ENGINE)
    row: dict[str, Any] = {
        "stop of 1P1D, ms": found[SERVICE][0],
        "reload and two steps of an engine, ms": found[ENGINE][0],
        "prompt of an engine, ms": found[PROMPT][0],
        "ratio": found[SERVICE][1],
    }
    return [row], []


async def _stop_ms(served: Serving, path: Path, args: argparse.Namespace) -> float:
    """Update the service while it streams. Return the longest time between two tokens, of those
    that fall into the update."""
    prompt = served.prompt(random.Random(time.time_ns()), args.prompt)
    asked = time.perf_counter()
    asking = asyncio.create_task(served.ask(prompt, args.tokens))
    async with rpc.open_channel(served.ready["grpc"]) as channel:
        await asyncio.sleep(1.0)  # it decodes now
        request = a.UpdateCheckpointRequest(path=str(path))
        begun_ms = (time.perf_counter() - asked) * 1e3
        await AdminStub(channel).UpdateCheckpoint(request, timeout=_LOADS_S)
        ended_ms = (time.perf_counter() - asked) * 1e3
    if asking.done():
        raise BenchError("the answer ended before the update: more --tokens")
    at_ms, _ = await asking
    return max(y - x for x, y in pairwise(at_ms) if x <= ended_ms and y >= begun_ms)


async def _engine_ms(
    engine: VllmEngine, path: Path, number: int, args: argparse.Namespace, *, is_update: bool
) -> float:
    """Return the time of a reload of an idle engine, and of two of its decode steps; without
    `is_update`, the time to the first token of a prompt."""
    chance = random.Random(time.time_ns())
    prompt = tuple(chance.randrange(16, 1000) for _ in range(args.prompt))
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    stream_id = 2 * number + is_update + 2
    begun = time.perf_counter()
    engine.submit(Work(stream_id, f"r{stream_id}", prompt, sampling, AggregatedPhase()))
    at = []
    async for result in engine.results:
        if result.deltas:
            at.append(time.perf_counter())
        if any(delta.finish_reason is not None for delta in result.deltas):
            break
    if not is_update:
        return (at[0] - begun) * 1e3
    step_s = median(later - earlier for earlier, later in pairwise(at))
    begun = time.perf_counter()
    # Not loaded in advance, as an engine alone does it.
    await engine.update_weights(WeightFiles(str(path)))
    return (time.perf_counter() - begun + _STEPS * step_s) * 1e3
