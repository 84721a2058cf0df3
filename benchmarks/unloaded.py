"""One request at a time through 1P1D and through one aggregated engine, in turn, in one run.

`python -m benchmarks.unloaded [--model demo|PATH] [--rounds 7] [--json]`

Both stacks are `pdserve up` with one core a worker and the same model and settings; the aggregated
engine has as many cores as the prefill worker. Each round sends the same fresh prompt of token ids
to both, in alternating order. Reported are medians and their ratio; absolute times are this
machine's at this moment.

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

from rich.console import Console
from rich.table import Table

from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from pdserve import rpc
from pdserve.client import Client
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAMPLING = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
ARMS: dict[str, dict[str, int]] = {
    "1P1D": {"prefill": 1, "decode": 1},
    "1A": {"prefill": 0, "decode": 0, "aggregated": 1},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, in seconds from sending; `prefill_s`, `transfer_*` and `exposed_s` are the
    receipt's, `digest_s` the workers'."""

    arm: str
    prompt_tokens: int
    ttft_s: float
    tt2t_s: float
    tpot_s: float
    e2e_s: float
    transfer_s: float
    exposed_s: float
    transfer_bytes: int
    prefill_s: float
    digest_s: float


def config_of(arm: str, model: str) -> dict[str, Any]:
    """The configuration of an arm's `pdserve up`, on free ports."""
    return {
        "router": {"http_port": 0, "grpc_port": 0},
        "worker": {"model": model},
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


async def ask(name: str, client: Client, prompt: list[int], workers: Sequence[str]) -> Sample:
    """Sends one prompt and times its tokens."""
    digested = await digest_seconds(workers)
    begun = time.perf_counter()
    times: list[float] = []
    receipt = None
    async for delta in client.generate(prompt, SAMPLING):
        times += [time.perf_counter() - begun] * len(delta.token_ids)
        receipt = delta.receipt or receipt
    assert receipt is not None
    return Sample(
        arm=name,
        prompt_tokens=len(prompt),
        ttft_s=times[0],
        tt2t_s=times[1] - times[0],
        tpot_s=(times[-1] - times[0]) / (len(times) - 1),
        e2e_s=times[-1],
        transfer_s=receipt.transfer_s,
        exposed_s=receipt.exposed_transfer_s,
        transfer_bytes=receipt.transfer_bytes,
        prefill_s=receipt.prefill_s,
        digest_s=await digest_seconds(workers) - digested,
    )


async def measure(
    stacks: Mapping[str, Mapping[str, Any]], lengths: Sequence[int], rounds: int
) -> list[Sample]:
    """`rounds` prompts of each length through every arm, the first of each left out as warm-up."""
    rng = random.Random(0)
    clients = {name: Client(ready["grpc"]) for name, ready in stacks.items()}
    workers = {name: [x["address"] for x in ready["workers"]] for name, ready in stacks.items()}
    vocabulary = (await next(iter(clients.values())).list_models())[0].vocab_size
    samples: list[Sample] = []
    for length in lengths:
        for turn in range(rounds + 1):
            prompt = [rng.randrange(16, vocabulary) for _ in range(length)]
            order = list(clients) if turn % 2 else list(reversed(clients))
            found = [await ask(name, clients[name], prompt, workers[name]) for name in order]
            samples += found if turn else []
    for client in clients.values():
        await client.close()
    return samples


async def run(
    model: str, lengths: Sequence[int], rounds: int
) -> tuple[list[Sample], dict[str, float]]:
    """(what was measured, seconds that each arm took to be ready)."""
    ready_s: dict[str, float] = {}
    stacks: dict[str, Mapping[str, Any]] = {}
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        for name in ARMS:
            stack = Stack(name, config_of(name, model), directory / name)
            ending.push_async_callback(stack.stop)
            begun = time.monotonic()
            await stack.start()
            ready_s[name] = time.monotonic() - begun
            assert stack.ready is not None
            stacks[name] = stack.ready
        return await measure(stacks, lengths, rounds), ready_s


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Medians by prompt length and their ratio, 1P1D to 1A."""
    rows = []
    for length in sorted({s.prompt_tokens for s in samples}):
        row: dict[str, Any] = {"prompt_tokens": length}
        for metric in ("ttft_s", "tt2t_s", "tpot_s", "e2e_s"):
            medians = {
                arm: statistics.median(
                    getattr(s, metric) for s in samples if (s.arm, s.prompt_tokens) == (arm, length)
                )
                for arm in ARMS
            }
            row[metric] = {**medians, "ratio": medians["1P1D"] / medians["1A"]}
        moved = [s for s in samples if (s.arm, s.prompt_tokens) == ("1P1D", length)]
        row["transfer_bytes"] = moved[0].transfer_bytes
        row["transfer_s"] = statistics.median(s.transfer_s for s in moved)
        row["exposed_s"] = statistics.median(s.exposed_s for s in moved)
        row["digest_s"] = statistics.median(s.digest_s for s in moved)
        row["digest_of_prefill"] = statistics.median(s.digest_s / s.prefill_s for s in moved)
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], ready: dict[str, float]) -> None:
    """The table, milliseconds."""
    table = Table(title="unloaded, 1P1D against one aggregated engine (medians, ms)")
    columns = ("prompt", "TTFT 1P1D / 1A", "ratio", "TT2T 1P1D / 1A", "TPOT 1P1D / 1A", "ratio")
    for column in (*columns, "KV MiB", "moving", "exposed", "digest"):
        table.add_column(column, justify="right")

    def pair(row: dict[str, Any], metric: str) -> str:
        return f"{row[metric]['1P1D'] * 1e3:.1f} / {row[metric]['1A'] * 1e3:.1f}"

    for row in rows:
        table.add_row(
            str(row["prompt_tokens"]),
            pair(row, "ttft_s"),
            f"{row['ttft_s']['ratio']:.3f}",
            pair(row, "tt2t_s"),
            pair(row, "tpot_s"),
            f"{row['tpot_s']['ratio']:.3f}",
            f"{row['transfer_bytes'] / 2**20:.1f}",
            f"{row['transfer_s'] * 1e3:.2f}",
            f"{row['exposed_s'] * 1e3:.2f}",
            f"{row['digest_s'] * 1e3:.2f} ({row['digest_of_prefill']:.2%})",
        )
    console = Console()
    console.print(table)
    console.print("ready after " + ", ".join(f"{s:.1f} s ({name})" for name, s in ready.items()))


def main() -> int:
    """Exit code 0 once everything was measured, 2 where an arm did not start."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="demo", help="demo or a model directory")
    parser.add_argument("--lengths", default="128,512,2048,4096", help="prompt lengths in tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    lengths = [int(x) for x in options.lengths.split(",")]
    try:
        samples, ready = asyncio.run(run(options.model, lengths, options.rounds))
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
