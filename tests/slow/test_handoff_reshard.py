"""Prefill and decode engines of different tensor-parallel sizes give the tokens of one aggregated
engine, and lose nothing where one rank of several breaks off.

Logprobs are not compared: two ranks add up in another order than one, which shows in the last bits.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio

from tests.e2e.engines import EngineProcess, settings
from tests.e2e.middle import Middle
from tests.e2e.pair import BLOCK, Joined, Pair, joined, params, prompt
from tests.patience import WAIT_S
from workers.engine import DecodePhase, PrefillPhase
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kv_transfer.snapshot import KvState
    from pdserve.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Of the whole model: 4 layers, 2 heads, K and V of 64 channels, float32.
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
_NAMES = itertools.count(1)


async def wide(model: Path) -> EngineProcess:
    """An engine of two ranks, with one of the model's two KV heads each, that polls for nothing."""
    kv = KvSettings(f"wide-instance-{next(_NAMES)}", {"transports": ("shm", "tcp")})
    args = {"max_num_batched_tokens": 256, "tensor_parallel_size": 2, "block_size": BLOCK}
    return await EngineProcess.start(
        settings(model, kv=kv, **args), env={"PDSERVE_TEST_NO_POLL": "1"}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wides(tiny_model: Path) -> AsyncIterator[tuple[EngineProcess, EngineProcess]]:
    """Two of them."""
    engines = await asyncio.gather(wide(tiny_model), wide(tiny_model))
    yield engines
    await asyncio.gather(*(engine.close() for engine in engines))


Wides = tuple[EngineProcess, EngineProcess]


@pytest.fixture(params=["2 to 1", "2 to 1, tcp", "1 to 2", "2 to 2", "2 to 1, other"])
def pair(
    request: pytest.FixtureRequest,
    wides: Wides,
    prefill: EngineProcess,
    pair_shm: Pair,
    pair_tcp: Pair,
) -> Pair:
    found = {
        "2 to 1": Pair(wides[0], pair_shm.decode, wides[0].instance_id),
        "2 to 1, tcp": Pair(wides[0], pair_tcp.decode, wides[0].instance_id),
        "1 to 2": Pair(prefill, wides[1], prefill.instance_id),
        "2 to 2": Pair(wides[0], wides[1], wides[0].instance_id),
        "2 to 1, other": Pair(wides[1], pair_tcp.decode, wides[1].instance_id),
    }[request.param]
    assert found.prefill.info.kv is not None
    assert found.decode.info.kv is not None
    assert found.prefill.info.kv.compatibility == found.decode.info.kv.compatibility
    return found


def said(answer: Joined) -> tuple[tuple[int, ...], str, FinishReason | None]:
    return answer.token_ids, answer.text, answer.finish_reason


async def all_empty(*engines: EngineProcess) -> None:
    """No block is pinned, and no rank knows of any transfer."""

    def is_empty(state: KvState | None) -> bool:
        return (
            state is not None
            and bool(state.ranks)
            and not any(rank.transfers or rank.quarantined_slots for rank in state.ranks)
        )

    for engine in engines:
        await engine.until_empty()
        async with asyncio.timeout(WAIT_S):
            while not is_empty(await engine.kv_state()):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 257, 700])
async def test_prompts_are_exact(pair: Pair, aggregated: EngineProcess, length: int) -> None:
    ids, sampling = prompt(length, next(_NAMES)), params(ignore_eos=True)
    expected = joined(await aggregated.run(ids, sampling))
    assert said(await pair.run(ids, sampling)) == said(expected)
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.blocks == -(-length // pair.decode.info.block_size)
    assert report.transfer.bytes == TOKEN_BYTES * BLOCK * report.transfer.blocks
    await all_empty(pair.prefill, pair.decode)


async def test_what_the_decode_side_has_does_not_travel(
    pair: Pair, aggregated: EngineProcess
) -> None:
    """Its prefix hit is the same on all of its ranks."""
    seed = next(_NAMES) * 100
    block_size = pair.decode.info.block_size
    prefix, sampling = prompt(5 * block_size + 7, seed), params(ignore_eos=True)
    await pair.decode.run(prefix + prompt(9), params(1))
    ids = prefix + prompt(70, seed)
    expected = joined(await aggregated.run(ids, sampling))
    assert said(await pair.run(ids, sampling)) == said(expected)
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.blocks == -(-len(ids) // block_size) - 5
    # A second time the decode side has all of it, and tells every rank of its source so.
    assert said(await pair.run(ids, sampling)) == said(expected)
    await all_empty(pair.prefill, pair.decode)


async def test_kv_ranks_tells_of_the_links_of_both_ranks(wides: Wides, pair_tcp: Pair) -> None:
    pair = Pair(wides[0], pair_tcp.decode, wides[0].instance_id)
    await pair.run(prompt(40, next(_NAMES)), params())
    links: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while not links or not all(links):
            state = await wides[0].kv_state()
            links = [] if state is None else [len(rank.links) for rank in state.ranks]
    assert len(links) == 2


async def test_cancelled_requests_leave_nothing_on_any_rank(pair: Pair) -> None:
    seed = next(_NAMES) * 100
    streams = [pair.submit(prompt(400, seed + i), params(200)) for i in range(4)]
    await pair.prefill.collect(streams[0][0])
    for first, second in streams:
        pair.prefill.cancel(first)
        pair.decode.cancel(second)
    await all_empty(pair.prefill, pair.decode)


async def held_half_way(
    source: EngineProcess, decode: EngineProcess, ids: Sequence[int]
) -> tuple[Middle, int, int]:
    """A request whose second source rank has sent a part of its share, and the first all of it; the
    wire, the first token, and the decode stream."""
    middle = Middle(source.addresses[1], 300_000)
    await middle.start()
    addresses = (source.addresses[0], middle.address)
    transfer_id = f"reshard-{next(_NAMES)}"
    sampling = params(ignore_eos=True)
    phase = DecodePhase(transfer_id, addresses, source.instance_id)
    stream = decode.submit(ids, sampling, phase)
    first = await source.run(ids, sampling, PrefillPhase(transfer_id))
    async with asyncio.timeout(WAIT_S):
        await middle.is_holding.wait()
    assert (await decode.status())[1].in_flight_blocks == -(-len(ids) // BLOCK)
    return middle, first.token_ids[0], stream


async def falls_back(
    aggregated: EngineProcess, decode: EngineProcess, ids: Sequence[int], stream: int, first: int
) -> None:
    """The load fails, once, and the decode engine computes the rest itself, exactly."""
    failed = await decode.collect(stream)
    assert failed.error is not None
    assert failed.error.code == "transfer_failed"
    assert not failed.token_ids
    sampling = params(ignore_eos=True)
    expected = await aggregated.run(ids, sampling)
    rest = await decode.run(ids, sampling, resume=(first,))
    assert (first, *rest.token_ids) == expected.token_ids


async def test_a_rank_whose_link_breaks_fails_its_request_alone(
    wides: Wides, pair_tcp: Pair, aggregated: EngineProcess
) -> None:
    source, decode, ids = wides[0], pair_tcp.decode, prompt(600, 31)
    middle, first, stream = await held_half_way(source, decode, ids)
    middle.cut()
    await falls_back(aggregated, decode, ids, stream, first)
    await all_empty(source, decode)
    await middle.close()
    again = prompt(200, 32)
    expected = joined(await aggregated.run(again, params()))
    assert said(await Pair(source, decode, source.instance_id).run(again, params())) == said(
        expected
    )
    await all_empty(source, decode)


async def test_a_rank_that_is_killed_half_way_costs_no_request(
    tiny_model: Path, pair_tcp: Pair, aggregated: EngineProcess
) -> None:
    source, decode, ids = await wide(tiny_model), pair_tcp.decode, prompt(600, 33)
    middle, first, stream = await held_half_way(source, decode, ids)
    victim = rank_at(source, source.addresses[1])
    shared = {Path(m.path) for m in victim.memory_maps() if m.path.startswith("/dev/shm/vllm")}
    victim.kill()
    await falls_back(aggregated, decode, ids, stream, first)
    await all_empty(decode)
    await middle.close()
    await source.close()
    for path in shared:  # of vLLM's collectives, which a killed rank leaves behind
        path.unlink(missing_ok=True)


def rank_at(engine: EngineProcess, address: str) -> psutil.Process:
    """The process of the engine's rank that listens there."""
    port = int(address.rpartition(":")[2])
    for process in psutil.Process(engine.pid).children(recursive=True):
        sockets = process.net_connections(kind="tcp")
        if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
            return process
    raise AssertionError(f"nobody listens at {address}")
