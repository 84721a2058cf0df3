"""One request at a time through 1P1D, through one aggregated worker, and to vLLM's AsyncLLM called
in its process, in turn, in one run.

`python -m benchmarks.unloaded [--model demo|PATH] [--rounds 7] [--tokens 129] [--json]`

1P1D and 1A are `pdserve up` with one core a worker; AsyncLLM's engine has the prefill worker's
core. All have the same model and settings, and 1P1D hands every prompt's KV over. Each round sends
the same fresh prompt of token ids to all, in alternating order. Reported are medians, and the
median of each round's ratios of 1P1D's to the others'; times are this machine's at this moment.

TPOT holds the hand-over, which an answer pays once: the fewer `--tokens`, the more of it. TPOT2 is
the same from the second token on, and `steps` the hand-over (TT2T less TPOT2) in steps of decode.

`digest` is what both of 1P1D's workers spent on digests of the prompt's KV, by their own count, and
its share of what the prefill worker spent on the prompt, by the receipt (median of the shares).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from benchmarks.report import stdout_console
from benchmarks.worker.peer import InProcess, engine_args
from pdserve import rpc
from pdserve.client import Client
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOKENS, FEWEST_TOKENS = 129, 3
OURS = "1P1D"
IN_PROCESS = "AsyncLLM"
METRICS = ("ttft_s", "tt2t_s", "tpot_s", "tpot2_s", "e2e_s")
MAX_NUM_SEQS = 64
ARMS: dict[str, dict[str, int]] = {
    OURS: {"prefill": 1, "decode": 1},
    "1A": {"prefill": 0, "decode": 0, "aggregated": 1},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: when each token came, in seconds from sending; `prefill_s`, `transfer_*` and
    `exposed_s` are the receipt's, `digest_s` the workers'."""

    arm: str
    turn: int
    prompt_tokens: int
    times_s: Sequence[float]
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    transfer_bytes: int = 0
    prefill_s: float = 0.0
    digest_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.times_s[0]

    @property
    def tt2t_s(self) -> float:
        """From the first to the second."""
        return self.times_s[1] - self.times_s[0]

    @property
    def tpot_s(self) -> float:
        """From each token to the next, on average."""
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    @property
    def tpot2_s(self) -> float:
        """The same from the second token on: without a hand-over."""
        return (self.times_s[-1] - self.times_s[1]) / (len(self.times_s) - 2)

    @property
    def e2e_s(self) -> float:
        """To the last token."""
        return self.times_s[-1]


def config_of(arm: str, model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an arm's `pdserve up`, on free ports."""
    router = {
        "http_port": 0,
        "grpc_port": 0,
        "policy": "least_loaded",
        # An engine on one core may take seconds for a step: that is no fault here.
        "detection": {"stall_s": 0},
    }
    return {
        "router": router,
        "worker": {"model": model, "engine_args": dict(arguments)},
        "up": {"cores_per_worker": 1, **ARMS[arm]},
    }


async def digest_seconds(workers: Sequence[str]) -> float:
    """What the workers at these addresses have spent on digests since they started."""
    total = 0.0
    for address in workers:
        async with rpc.open_channel(address) as channel:
            status = await WorkerStub(channel).GetStatus(w.GetStatusRequest())
            total += status.kv.totals.get("digest_s", 0.0)
    return total


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, the round that it belongs to, and how long its answer is to be."""

    turn: int
    prompt: list[int]
    tokens: int


async def ask(name: str, client: Client, asked: Asked, workers: Sequence[str]) -> Sample:
    """Sends one prompt and times its tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True)
    digested = await digest_seconds(workers)
    begun = time.perf_counter()
    times: list[float] = []
    receipt = None
    async for delta in client.generate(asked.prompt, sampling):
        times += [time.perf_counter() - begun] * len(delta.token_ids)
        receipt = delta.receipt or receipt
    assert receipt is not None
    return Sample(
        arm=name,
        turn=asked.turn,
        prompt_tokens=len(asked.prompt),
        times_s=times,
        transfer_s=receipt.transfer_s,
        exposed_s=receipt.exposed_transfer_s,
        transfer_bytes=receipt.transfer_bytes,
        prefill_s=receipt.prefill_s,
        digest_s=await digest_seconds(workers) - digested,
    )


async def measure(
    stacks: Mapping[str, Mapping[str, Any]],
    peer: InProcess,
    lengths: Sequence[int],
    rounds: int,
    tokens: int,
) -> list[Sample]:
    """`rounds` prompts of each length through every arm, the first of each left out as warm-up."""
    rng = random.Random(0)
    clients = {name: Client(ready["grpc"]) for name, ready in stacks.items()}
    workers = {name: [x["address"] for x in ready["workers"]] for name, ready in stacks.items()}
    vocabulary = (await next(iter(clients.values())).list_models())[0].vocab_size

    async def sample(name: str, asked: Asked) -> Sample:
        if name == IN_PROCESS:
            (times,) = await peer.times([asked.prompt], asked.tokens)
            return Sample(name, asked.turn, len(asked.prompt), times)
        return await ask(name, clients[name], asked, workers[name])

    samples: list[Sample] = []
    for length in lengths:
        for turn in range(rounds + 1):
            asked = Asked(turn, [rng.randrange(16, vocabulary) for _ in range(length)], tokens)
            names = [*clients, IN_PROCESS]
            found = [await sample(x, asked) for x in (names if turn % 2 else reversed(names))]
            samples += found if turn else []
    for client in clients.values():
        await client.close()
    return samples


async def run(
    model: str, lengths: Sequence[int], rounds: int, tokens: int, kv_cache_mib: int
) -> tuple[list[Sample], dict[str, float]]:
    """(what was measured, seconds that each arm took to be ready)."""
    ready_s: dict[str, float] = {}
    arguments = engine_args(kv_cache_mib, max_num_seqs=MAX_NUM_SEQS)
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        stacks: dict[str, Stack] = {}
        for name in ARMS:
            stacks[name] = Stack(name, config_of(name, model, arguments), directory / name)
            ending.push_async_callback(stacks[name].stop)
            begun = time.monotonic()
            await stacks[name].start()
            ready_s[name] = time.monotonic() - begun
        ready = {name: stack.ready for name, stack in stacks.items() if stack.ready is not None}
        pids = {worker["role"]: worker["pid"] for worker in ready[OURS]["workers"]}
        (core,) = psutil.Process(pids["prefill"]).cpu_affinity()
        path = (await stacks[OURS].workers())[0]["model_path"]
        settings = {"model": path, "engine_args": arguments, "core": core}
        peer = InProcess(settings, directory / "in_process.log")
        ending.push_async_callback(peer.stop)
        begun = time.monotonic()
        await peer.start()
        ready_s[IN_PROCESS] = time.monotonic() - begun
        return await measure(ready, peer, lengths, rounds, tokens), ready_s


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """By prompt length: medians, and the median over rounds of 1P1D's ratios to the others'."""
    rows = []
    for length in sorted({s.prompt_tokens for s in samples}):
        row: dict[str, Any] = {"prompt_tokens": length}
        found = {(s.arm, s.turn): s for s in samples if s.prompt_tokens == length}
        turns = sorted({turn for _, turn in found})
        for metric in METRICS:
            of = {key: getattr(sample, metric) for key, sample in found.items()}
            row[metric] = {
                arm: statistics.median(of[arm, turn] for turn in turns)
                for arm in (*ARMS, IN_PROCESS)
            } | {
                f"/ {arm}": statistics.median(of[OURS, turn] / of[arm, turn] for turn in turns)
                for arm in ("1A", IN_PROCESS)
            }
        moved = [found[OURS, turn] for turn in turns]
        row["handover_steps"] = statistics.median(s.tt2t_s / s.tpot2_s - 1 for s in moved)
        row["transfer_bytes"] = moved[0].transfer_bytes
        row["transfer_s"] = statistics.median(s.transfer_s for s in moved)
        row["exposed_s"] = statistics.median(s.exposed_s for s in moved)
        row["digest_s"] = statistics.median(s.digest_s for s in moved)
        row["digest_of_prefill"] = statistics.median(s.digest_s / s.prefill_s for s in moved)
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], ready: dict[str, float]) -> None:
    """The table, milliseconds."""
    table = Table(title=f"unloaded: 1P1D, 1A and {IN_PROCESS} in process (medians, ms)")
    columns = ["prompt"]
    for metric in ("TTFT", "TPOT", "TPOT2"):
        columns += [f"{metric} {OURS}", "1A", IN_PROCESS, "/ 1A", f"/ {IN_PROCESS}"]
    for column in (*columns, "TT2T", "steps", "KV MiB", "moving", "exposed", "digest"):
        table.add_column(column, justify="right")

    def all_arms(row: dict[str, Any], metric: str) -> list[str]:
        arms = [f"{row[metric][arm] * 1e3:.1f}" for arm in (*ARMS, IN_PROCESS)]
        return [*arms, *(f"{row[metric][f'/ {arm}']:.3f}" for arm in ("1A", IN_PROCESS))]

    for row in rows:
        table.add_row(
            str(row["prompt_tokens"]),
            *all_arms(row, "ttft_s"),
            *all_arms(row, "tpot_s"),
            *all_arms(row, "tpot2_s"),
            f"{row['tt2t_s'][OURS] * 1e3:.1f}",
            f"{row['handover_steps']:.2f}",
            f"{row['transfer_bytes'] / 2**20:.1f}",
            f"{row['transfer_s'] * 1e3:.2f}",
            f"{row['exposed_s'] * 1e3:.2f}",
            f"{row['digest_s'] * 1e3:.2f} ({row['digest_of_prefill']:.2%})",
        )
    console = stdout_console()
    console.print(table)
    console.print("ready after " + ", ".join(f"{s:.1f} s ({name})" for name, s in ready.items()))


def main() -> int:
    """Exit code 0 once everything was measured, 2 where an arm did not start."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="demo", help="demo or a model directory")
    parser.add_argument("--lengths", default="128,512,2048,4096", help="prompt lengths in tokens")
    parser.add_argument(
        "--kv-cache-mib", type=int, default=512, help="of each engine (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of each answer, 3 or more (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    if options.tokens < FEWEST_TOKENS:
        parser.error(f"--tokens must be {FEWEST_TOKENS} or more: {options.tokens}")
    lengths = [int(x) for x in options.lengths.split(",")]
    try:
        samples, ready = asyncio.run(
            run(options.model, lengths, options.rounds, options.tokens, options.kv_cache_mib)
        )
    except BenchError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 2
    rows = summary(samples)
    if options.json:
        sys.stdout.write(json.dumps({"ready_s": ready, "rows": rows}, indent=1) + "\n")
    else:
        show(rows, ready)
    return 0


if __name__ == "__main__":
    sys.exit(main())
