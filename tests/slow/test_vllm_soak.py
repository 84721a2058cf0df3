"""Real engines under requests that are aborted at any moment, many at once: both ledgers come back
to nothing, and whatever was left alone is answered as one engine answers it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from pdserve.types import FinishReason
from tests.e2e.engines import EngineProcess, settings
from tests.e2e.pair import Pair, joined
from tests.e2e.test_handoff_exact import params, prompt
from workers.engine import PrefillPhase
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.pair import Joined

pytestmark = pytest.mark.asyncio(loop_scope="session")
REQUESTS = 90
# Decode comes for it well within this.
LEASE_S = 15.0
AT_ONCE = 8
FATES = {"nothing": 45, "decode": 20, "prefill": 15, "both": 15, "nobody takes it": 5}
SEED = 20261121


class Storm:
    """One request after the other, and what is done to it. `answers` has those left alone."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._rng = random.Random(SEED)
        self.tally: Counter[str] = Counter()
        self.answers: list[tuple[list[int], int, Joined]] = []

    async def run(self, requests: int) -> None:
        """Keeps AT_ONCE requests going until so many are over."""
        todo = iter(range(requests))

        async def one_after_the_other() -> None:
            for i in todo:
                await self._one(i)

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))

    async def _one(self, number: int) -> None:
        rng, pair = self._rng, self._pair
        (fate,) = rng.choices([*FATES], [*FATES.values()])
        ids = prompt(rng.randint(20, 700), 70_000 + number + 1000 * pair.decode.pid)
        length = rng.randint(2, 24)
        pause_s = rng.choice((0.0, 0.01, 0.05, 0.2, 0.5))
        self.tally[fate] += 1
        if fate == "nobody takes it":
            await pair.prefill.run(
                ids, params(length), PrefillPhase(f"alone-{number}-{pair.instance_id}")
            )
            return
        streams = pair.submit(ids, params(length, ignore_eos=True))
        if fate == "nothing":
            self.answers.append((ids, length, await pair.collect(streams)))
            return
        await asyncio.sleep(pause_s)
        if fate in ("prefill", "both"):
            pair.prefill.cancel(streams[0])
        if fate in ("decode", "both"):
            pair.decode.cancel(streams[1])
        if fate == "prefill":
            # Cancelled before its blocks had gone, it fails the decode; later it does not.
            answer = await pair.decode.collect(streams[1])
            assert answer.finish_reason in (FinishReason.ERROR, FinishReason.LENGTH)
            self.tally[f"prefill: {answer.finish_reason}"] += 1


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def source(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    """A prefill engine whose leases are waited out."""
    kv = KvSettings("soaked", {"transports": ("shm", "tcp"), "lease_s": LEASE_S})
    engine = await EngineProcess.start(settings(tiny_model, kv=kv, max_num_batched_tokens=256))
    yield engine
    await engine.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, source: EngineProcess) -> Pair:
    other: Pair = request.getfixturevalue(f"pair_{request.param}")
    return Pair(source, other.decode, source.instance_id)


async def test_no_storm_of_aborts_leaves_a_block_pinned(
    pair: Pair, aggregated: EngineProcess
) -> None:
    storm = Storm(pair)
    await storm.run(REQUESTS)
    assert min(storm.tally[fate] for fate in FATES) >= 2, storm.tally
    # What nobody took is freed by its lease; all else is free by now or in a moment.
    await pair.prefill.until_empty()
    await pair.decode.until_empty()
    assert len(storm.answers) >= 20
    for ids, length, answer in storm.answers[:6]:
        assert answer == joined(await aggregated.run(ids, params(length, ignore_eos=True)))
