"""The blocks of a chunk travel while the next chunk computes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kv_transfer.settings import read_extra_config
from tests.support.engine_pair import BLOCK, CHUNK, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.timeouts import WAIT_S
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.engine_pair import EnginePair

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 3500
BLOCKS = -(-TOKENS // BLOCK)


def events(path: Path) -> list[tuple[str, int, float]]:
    """Return the events that wait_for_copies.py wrote: kind, tokens or blocks, time."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [(what, int(count), float(at)) for what, count, at in lines]


def wait_for_subscription(path: Path) -> None:
    end, pause = time.monotonic() + WAIT_S, threading.Event()
    while not path.exists():
        assert time.monotonic() < end
        pause.wait(0.01)


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def pair(request: pytest.FixtureRequest, transport: str) -> EnginePair:
    found: EnginePair = request.getfixturevalue(f"pair_{transport}")
    return found


async def test_all_but_the_last_chunk_has_come_when_the_prompt_is_computed(
    pair: EnginePair, transport: str, tiny_model: Path, tmp_path: Path
) -> None:
    path, name = tmp_path / "events", f"overlap-{transport}"
    kv = read_extra_config({"transports": (transport,)})
    engine = await EngineProcess.start(
        settings(tiny_model, kv=kv, instance_id=name, max_num_batched_tokens=CHUNK),
        env={
            "PDSERVE_TEST_WAIT_FOR_COPIES": str(path),
            "PDSERVE_TEST_WAIT_FOR_COPIES_TOKENS": str(TOKENS),
        },
    )
    # The first token could be the end, which the prefill engine would not hand over.
    ids, sampling = prompt(TOKENS, 90 + pair.decode.pid), params(ignore_eos=True)
    decoding = pair.decode.submit(ids, sampling, engine.decode_phase(name))
    await asyncio.to_thread(wait_for_subscription, path)
    await engine.run(ids, sampling, PrefillPhase(name))
    answer = await pair.decode.collect(decoding)
    over = time.monotonic()
    assert answer.error is None
    noted = events(path)
    ends = [i for i, event in enumerate(noted) if event[0] == "computed"]
    steps = [noted[i][1] for i in ends]
    assert noted[0][:2] == ("subscribed", BLOCKS)
    assert len(steps) >= TOKENS // CHUNK
    assert steps[-1] == TOKENS
    before = [count for what, count, _ in noted[: ends[-1]] if what == "copied"]
    assert before[-1] == steps[-2] // BLOCK
    assert noted[-1][:2] == ("copied", BLOCKS)
    assert answer.report is not None
    transfer = answer.report.transfer
    assert transfer is not None
    assert transfer.blocks == BLOCKS
    # What the request waited for, not all that was moved.
    assert 0 <= transfer.exposed_s < over - noted[ends[-1]][2]
    await engine.until_empty()
    await pair.decode.until_empty()
    await engine.close()
