"""The pause that a client sees while its answer leaves a decode worker which is drained.

`python -m benchmarks.moving NAME=HOST:PORT ... [--prompt-tokens 2048] [--rounds 8]`

Each argument is an arm: the gRPC address of a router. All know the same workers, one that prefills
and two that decode, and differ in how answers leave (`router.fallback.live_kv`). Each round asks
each arm, in turn, for an answer to a fresh prompt, drains the worker that decodes it once it has
begun, and takes the longest gap between two tokens from then on. Reported are medians, the range,
and what the receipts say; absolute times are this machine's at this moment.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve import rpc
from pdserve.client import Client
from pdserve.types import SamplingParams
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGUN_TOKENS = 20
SAMPLING = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
TIMEOUT_S = 120.0
LOOK_S = 0.05
VOCABULARY = range(20, 400)


@dataclass(slots=True)
class Arm:
    """One router, and what was measured there."""

    name: str
    address: str
    gaps_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)

    async def ask(self, prompt: Sequence[int]) -> None:
        """One answer that leaves its worker."""
        arrivals: list[float] = []
        draining: asyncio.Task[str] | None = None
        drained_from = 0
        async with Client(self.address) as client:
            async for delta in client.generate(prompt, SAMPLING):
                arrivals.append(time.monotonic())
                if len(arrivals) == BEGUN_TOKENS:
                    drained_from = len(arrivals) - 1
                    draining = asyncio.create_task(self._drain())
                if delta.receipt is not None:
                    self.fallbacks.update(delta.receipt.fallbacks or ("none",))
        if draining is None:
            raise RuntimeError(f"the answer ended after {len(arrivals)} pieces")
        await self._undrain(await draining)
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        self.gaps_s += gaps[:drained_from]
        self.pauses_s.append(max(gaps[drained_from:]))

    async def _drain(self) -> str:
        """Drains the decode worker that has the answer, at once."""
        entries = await self.entries()
        name = max(entries, key=lambda x: entries[x].outstanding_requests)
        async with rpc.open_channel(self.address) as channel:
            request = a.DrainWorkerRequest(worker_id=name)
            steps = [x async for x in AdminStub(channel).DrainWorker(request, timeout=TIMEOUT_S)]
        if not steps[-1].drained:
            raise RuntimeError(f"worker {name} was not drained")
        return name

    async def _undrain(self, name: str) -> None:
        async with rpc.open_channel(self.address) as channel:
            request = a.UndrainWorkerRequest(worker_id=name)
            await AdminStub(channel).UndrainWorker(request, timeout=TIMEOUT_S)

    async def entries(self) -> dict[str, w.WorkerEntry]:
        """The decode workers, as the router knows them."""
        async with rpc.open_channel(self.address) as channel:
            stub = RegistryStub(channel)
            reply = await stub.ListWorkers(w.ListWorkersRequest(), timeout=TIMEOUT_S)
        return {x.info.worker_id: x for x in reply.workers if x.info.role == w.ROLE_DECODE}

    async def until_ready(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if all(x.state == "ready" for x in (await self.entries()).values()):
                    return
                await asyncio.sleep(LOOK_S)

    def report(self) -> dict[str, object]:
        """In milliseconds."""
        return {
            "arm": self.name,
            "rounds": len(self.pauses_s),
            "pause_ms": round(statistics.median(self.pauses_s) * 1e3, 1),
            "pause_range_ms": [round(f(self.pauses_s) * 1e3, 1) for f in (min, max)],
            "itl_before_ms": round(statistics.median(self.gaps_s) * 1e3, 1),
            "fallbacks": dict(self.fallbacks),
        }


async def measure(arms: Sequence[Arm], *, prompt_tokens: int, rounds: int, seed: int) -> None:
    """Round by round, in alternating order."""
    draw = random.Random(seed)
    for number in range(rounds):
        for arm in arms if number % 2 else reversed(arms):
            for each in arms:
                await each.until_ready()
            await arm.ask([draw.choice(VOCABULARY) for _ in range(prompt_tokens)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving", description=__doc__)
    parser.add_argument("arms", nargs="+", metavar="NAME=HOST:PORT")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    arms = [Arm(*text.split("=", 1)) for text in given.arms]
    asyncio.run(
        measure(arms, prompt_tokens=given.prompt_tokens, rounds=given.rounds, seed=given.seed)
    )
    for arm in arms:
        sys.stdout.write(json.dumps(arm.report()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
