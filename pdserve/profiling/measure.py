"""Measures a running service: a small grid of prompt lengths and concurrency, then what its router
has fitted."""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import grpc.aio

from pdserve import __version__, rpc
from pdserve.client import Client
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.profiling.document import Profile, Sample, StepProfile, WorkerProfile
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from pdserve.wire import role_from_pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pdserve.client import Delta, ModelCard
    from pdserve.types import Receipt

_LIST_S = 10.0
_TOLD_S = 0.6
_FITTED_S = 2.1
# The first tokens of a vocabulary are often special ones.
_FIRST_TOKEN = 20


@dataclass(frozen=True, slots=True)
class Grid:
    """Every prompt length with every concurrency, `rounds` times over."""

    prompts: tuple[int, ...] = (32, 128, 512, 1024)
    concurrency: tuple[int, ...] = (1, 4, 8)
    output_tokens: int = 32
    rounds: int = 2

    @property
    def cells(self) -> list[tuple[int, int]]:
        return list(itertools.product(self.prompts, self.concurrency))


@dataclass(frozen=True, slots=True)
class Service:
    """What is measured; an empty `model` is the only one. The dialer's token is the API key."""

    address: str
    model: str = ""
    dialer: rpc.Dialer = rpc.PLAIN
    timeout_s: float = 300.0


async def measure(
    service: Service, grid: Grid, tell: Callable[[int, int, Sequence[Sample]], None]
) -> Profile:
    """The profile. `tell` hears of each cell: how many are done, of how many, and its samples.
    Raises PdserveError, InvalidRequest where a prompt does not fit the model's context."""
    seed = int.from_bytes(os.urandom(4))  # what was asked before may be cached
    async with Client(
        service.address, api_key=service.dialer.token, dialer=service.dialer
    ) as client:
        card = _card(await client.list_models(), service.model)
        longest = max(grid.prompts) + grid.output_tokens
        if longest > card.max_model_len:
            raise InvalidRequest(
                f"prompts and answers of {longest} tokens do not fit the {card.max_model_len} of "
                f"model {card.name}",
                field="prompts",
            )
        run = _Run(client, card, grid, random.Random(seed), service.timeout_s)
        samples: list[Sample] = []
        for done, (prompt_tokens, concurrency) in enumerate(grid.cells, 1):
            found = await run.cell(prompt_tokens, concurrency)
            samples += found
            tell(done, len(grid.cells), found)
        # Workers say every half second what steps cost, as they make one; routers fit it every two.
        await asyncio.sleep(_TOLD_S)
        await run.cell(min(grid.prompts), max(grid.concurrency))
        await asyncio.sleep(_FITTED_S)
    return Profile(
        model=card.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=seed,
        host={
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": str(os.cpu_count()),
        },
        workers=tuple(await _workers(service, card.name)),
        samples=tuple(samples),
        version=__version__,
    )


def _card(cards: Sequence[ModelCard], name: str) -> ModelCard:
    served = {card.name: card for card in cards}
    if not name and len(served) == 1:
        return next(iter(served.values()))
    if name not in served:
        raise InvalidRequest(f"name one of the served models: {', '.join(served)}", field="model")
    return served[name]


@dataclass(frozen=True, slots=True)
class _Run:
    client: Client
    card: ModelCard
    grid: Grid
    draw: random.Random
    timeout_s: float

    async def cell(self, prompt_tokens: int, concurrency: int) -> list[Sample]:
        found: list[Sample] = []
        for _ in range(self.grid.rounds):
            asked = [self._ask(prompt_tokens, concurrency) for _ in range(concurrency)]
            found += await asyncio.gather(*asked)
        return found

    async def _ask(self, prompt_tokens: int, concurrency: int) -> Sample:
        prompt = [
            self.draw.randrange(_FIRST_TOKEN, self.card.vocab_size) for _ in range(prompt_tokens)
        ]
        sampling = SamplingParams(
            max_tokens=self.grid.output_tokens, temperature=0.0, ignore_eos=True
        )
        asked_at, times, receipt = time.monotonic(), list[float](), None
        deltas = self.client.generate(
            prompt, sampling, model=self.card.name, timeout_s=self.timeout_s
        )
        # An async generator behind its narrower type; closing it cancels the request.
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                if delta.token_ids:
                    times.append(time.monotonic())
                receipt = delta.receipt or receipt
        if receipt is None or not times:
            raise Unavailable("an answer came without tokens or receipt")
        return _sample(prompt_tokens, concurrency, asked_at, times, receipt)


def _sample(
    prompt_tokens: int, concurrency: int, asked_at: float, times: list[float], receipt: Receipt
) -> Sample:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return Sample(
        prompt_tokens=prompt_tokens,
        concurrency=concurrency,
        output_tokens=len(times),
        ttft_s=times[0] - asked_at,
        tpot_s=sum(gaps[1:]) / max(1, len(gaps) - 1),
        max_gap_s=max(gaps, default=0.0),
        queue_s=receipt.queue_s,
        prefill_s=receipt.prefill_s,
        exposed_transfer_s=receipt.exposed_transfer_s,
        transfer_bytes=receipt.transfer_bytes,
        prefill_worker=receipt.prefill_worker,
        decode_worker=receipt.decode_worker,
    )


async def _workers(service: Service, model: str) -> list[WorkerProfile]:
    async with service.dialer.open_channel(service.address) as channel:
        try:
            listed = await RegistryStub(channel).ListWorkers(
                w.ListWorkersRequest(), timeout=_LIST_S, metadata=service.dialer.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
    return [
        _worker(entry)
        for entry in listed.workers
        if entry.info.model.name == model and entry.state != "lost"
    ]


def _worker(entry: w.WorkerEntry) -> WorkerProfile:
    info, steps = entry.info, None
    if entry.HasField("steps"):
        x = entry.steps
        steps = StepProfile(
            tuple(x.coefficients),
            x.prefill_steps,
            x.decode_steps,
            x.prefill_end,
            x.error,
            x.chunk_tokens,
        )
    return WorkerProfile(
        worker_id=info.worker_id,
        role=role_from_pb(info.role),
        model=info.model.name,
        engine=info.engine,
        block_size=info.block_size,
        total_blocks=info.total_blocks,
        max_num_seqs=info.max_num_seqs,
        settings=dict(info.settings),
        steps=steps,
    )
