"""Prefill and decode engines of different tensor-parallel sizes give the tokens of one aggregated
engine, and lose no request when one of several ranks fails. Logprobs are not compared: two ranks
add in another order than one, which changes the last bits."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from tests.support.engine_pair import BLOCK, EnginePair, JoinedAnswer, joined, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.timeouts import WAIT_S
from workers.engine import DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from kv_transfer.protocol.snapshot import KvState
    from pdserve.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Of the whole model: 4 layers, 2 heads, K and V of 64 channels, float32.
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
_NAMES = itertools.count(1)


async def wide(model: Path) -> EngineProcess:
    """Start an engine of two ranks without polling, with one of the model's two KV heads per
    rank."""
    kv, name = ConnectorConfig(transports=("shm", "tcp")), f"wide-instance-{next(_NAMES)}"
    args = {"max_num_batched_tokens": 256, "tensor_parallel_size": 2, "block_size": BLOCK}
    return await EngineProcess.start(
        settings(model, kv=kv, instance_id=name, **args), env={"PDSERVE_TEST_NO_POLLING": "1"}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wides(tiny_model: Path) -> AsyncIterator[tuple[EngineProcess, EngineProcess]]:
    """Start two such engines."""
    engines = await asyncio.gather(wide(tiny_model), wide(tiny_model))
    yield engines
    await asyncio.gather(*(engine.close() for engine in engines))


Wides = tuple[EngineProcess, EngineProcess]


@pytest.fixture(params=["2 to 1", "2 to 1, tcp", "1 to 2", "2 to 2", "2 to 1, other"])
def pair(
    request: pytest.FixtureRequest,
    wides: Wides,
    prefill: EngineProcess,
    pair_shm: EnginePair,
    pair_tcp: EnginePair,
) -> EnginePair:
    found = {
        "2 to 1": EnginePair(wides[0], pair_shm.decode, wides[0].instance_id),
        "2 to 1, tcp": EnginePair(wides[0], pair_tcp.decode, wides[0].instance_id),
        "1 to 2": EnginePair(prefill, wides[1], prefill.instance_id),
        "2 to 2": EnginePair(wides[0], wides[1], wides[0].instance_id),
        "2 to 1, other": EnginePair(wides[1], pair_tcp.decode, wides[1].instance_id),
    }[request.param]
    assert found.prefill.info.kv is not None
    assert found.decode.info.kv is not None
    assert found.prefill.info.kv.compatibility == found.decode.info.kv.compatibility
    return found


def said(answer: JoinedAnswer) -> tuple[tuple[int, ...], str, FinishReason | None]:
    return answer.token_ids, answer.text, answer.finish_reason


async def all_empty(*engines: EngineProcess) -> None:
    """Wait until no block is pinned and no rank has a transfer."""

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


@pytest.mark.parametrize("length", [1, BLOCK + 1, 257, 700])
async def test_prompts_are_exact(pair: EnginePair, aggregated: EngineProcess, length: int) -> None:
    ids, sampling = prompt(length, next(_NAMES)), params(ignore_eos=True)
    expected = joined(await aggregated.run(ids, sampling))
    assert said(await pair.run(ids, sampling)) == said(expected)
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.blocks == -(-length // pair.decode.info.block_size)
    assert report.transfer.bytes == TOKEN_BYTES * BLOCK * report.transfer.blocks
    await all_empty(pair.prefill, pair.decode)


async def test_blocks_cached_by_decode_are_not_transferred(
    pair: EnginePair, aggregated: EngineProcess
) -> None:
    """The prefix hit is the same on all ranks."""
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


async def test_kv_ranks_shows_the_links_of_both_ranks(wides: Wides, pair_tcp: EnginePair) -> None:
    pair = EnginePair(wides[0], pair_tcp.decode, wides[0].instance_id)
    await pair.run(prompt(40, next(_NAMES)), params())
    links: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while not links or not all(links):
            state = await wides[0].kv_state()
            links = [] if state is None else [len(rank.links) for rank in state.ranks]
    assert len(links) == 2


async def test_cancelled_requests_leave_nothing_on_any_rank(pair: EnginePair) -> None:
    seed = next(_NAMES) * 100
    streams = [pair.submit(prompt(400, seed + i), params(200)) for i in range(4)]
    await pair.prefill.collect(streams[0][0])
    for first, second in streams:
        pair.prefill.cancel(first)
        pair.decode.cancel(second)
    await all_empty(pair.prefill, pair.decode)


async def held_half_way(
    source: EngineProcess, decode: EngineProcess, ids: Sequence[int]
) -> tuple[TcpProxy, int, int]:
    """A request whose second source rank has sent a part of its share, and the first all of it; the
    wire, the first token, and the decode stream."""
    middle = TcpProxy(source.addresses[1], 300_000)
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
    """The load fails once, and the decode engine computes the rest exactly."""
    failed = await decode.collect(stream)
    assert failed.error is not None
    assert failed.error.code == "transfer_failed"
    assert not failed.token_ids
    sampling = params(ignore_eos=True)
    expected = await aggregated.run(ids, sampling)
    rest = await decode.run(ids, sampling, resume=(first,))
    assert (first, *rest.token_ids) == expected.token_ids


async def test_a_rank_whose_link_breaks_fails_only_its_request(
    wides: Wides, pair_tcp: EnginePair, aggregated: EngineProcess
) -> None:
    source, decode, ids = wides[0], pair_tcp.decode, prompt(600, 31)
    middle, first, stream = await held_half_way(source, decode, ids)
    middle.cut()
    await falls_back(aggregated, decode, ids, stream, first)
    await all_empty(source, decode)
    await middle.close()
    again = prompt(200, 32)
    expected = joined(await aggregated.run(again, params()))
    assert said(await EnginePair(source, decode, source.instance_id).run(again, params())) == said(
        expected
    )
    await all_empty(source, decode)


async def test_a_rank_killed_during_the_transfer_costs_no_request(
    tiny_model: Path, pair_tcp: EnginePair, aggregated: EngineProcess
) -> None:
    source, decode, ids = await wide(tiny_model), pair_tcp.decode, prompt(600, 33)
    middle, first, stream = await held_half_way(source, decode, ids)
    victim = rank_at(source, source.addresses[1])
    victim.kill()
    await falls_back(aggregated, decode, ids, stream, first)
    await all_empty(decode)
    await middle.close()
    await source.close()


def rank_at(engine: EngineProcess, address: str) -> psutil.Process:
    """Return the process of the rank that listens at this address."""
    port = int(address.rpartition(":")[2])
    for process in psutil.Process(engine.pid).children(recursive=True):
        sockets = process.net_connections(kind="tcp")
        if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
            return process
    raise AssertionError(f"nobody listens at {address}")
