"""What real engines show of their KV plane, in one process and in several."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.e2e.engines import EngineProcess, settings
from tests.e2e.test_handoff_exact import params, prompt
from tests.patience import WAIT_S
from workers.engine import PrefillPhase
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kv_transfer.snapshot import KvSnapshot, KvState

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = params(50, ignore_eos=True)


async def until(engine: EngineProcess, what: Callable[[tuple[KvSnapshot, ...]], bool]) -> KvState:
    """The state once `what` holds of its ranks; where they are other processes, the state that is
    shown is the one seen when it was last asked for."""
    async with asyncio.timeout(WAIT_S):
        while True:
            state = await engine.kv_state()
            assert state is not None
            if what(state.ranks):
                return state


async def shows_what_it_holds(engine: EngineProcess, ranks: int) -> None:
    stream = engine.submit(prompt(100, 1), LONG, PrefillPhase("held"))
    await engine.collect(stream)

    def is_held(seen: tuple[KvSnapshot, ...]) -> bool:
        return len(seen) == ranks and all(x.transfers and x.transfers[0].lease_left_s for x in seen)

    state = await until(engine, is_held)
    assert state.ledger.pinned_blocks == state.ledger.leased_blocks == 4
    for rank in state.ranks:
        (transfer,) = rank.transfers
        assert (transfer.transfer_id, transfer.side, transfer.blocks) == ("held", "producer", 4)
    engine.cancel(stream)
    state = await until(engine, lambda seen: not any(x.transfers for x in seen))
    await engine.until_empty(WAIT_S)
    assert state.report().totals["pushed_bytes"] >= 0


async def test_an_engine_in_one_process_shows_the_moment(prefill: EngineProcess) -> None:
    await shows_what_it_holds(prefill, 1)


async def test_an_engine_in_two_processes_shows_both(tiny_model: Path) -> None:
    kv = KvSettings("two", {"transports": ("tcp",), "lease_s": 3600.0})
    engine = await EngineProcess.start(settings(tiny_model, kv=kv, tensor_parallel_size=2))
    try:
        await shows_what_it_holds(engine, 2)
    finally:
        await engine.close()


async def test_an_engine_without_kv_shows_none(aggregated: EngineProcess) -> None:
    assert await aggregated.kv_state() is None
