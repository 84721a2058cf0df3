"""The same request gives the same tokens, text and logprobs through prefill and decode as through
one aggregated engine, in float32, where no tie can flip."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.engine_pair import BLOCK, KINDS, EnginePair, joined, params, prompt
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")

# 1 to 3000 around the edges of blocks and of prefill chunks.
LENGTHS = [1, 2, 31, 32, 33, 64, 255, 256, 257, 512, 513, 1537, 3000]


@pytest.mark.parametrize(
    ("pair", "length"),
    [*(("shm", x) for x in LENGTHS), *(("tcp", x) for x in (1, 33, 257, 3000))],
    indirect=["pair"],
)
async def test_every_prompt_length_is_exact(
    pair: EnginePair, aggregated: EngineProcess, length: int
) -> None:
    ids, sampling = prompt(length), params(ignore_eos=True)
    expected = joined(await aggregated.run(ids, sampling))
    assert await pair.run(ids, sampling) == expected
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.blocks == -(-length // BLOCK)
    await pair.until_empty()


# A prompt of several chunks once, with all that a kind can carry over from prefill to decode.
@pytest.mark.parametrize(
    ("kind", "length"), [*((kind, 40) for kind in KINDS), ("seeded penalties logprobs", 700)]
)
async def test_every_kind_of_sampling_is_exact(
    pair_shm: EnginePair, aggregated: EngineProcess, kind: str, length: int
) -> None:
    ids, sampling = prompt(length, 1), params(32, **KINDS[kind])
    expected = joined(await aggregated.run(ids, sampling))
    assert await pair_shm.run(ids, sampling) == expected
    await pair_shm.until_empty()


async def test_a_first_token_that_ends_the_answer_needs_no_decode(
    pair_shm: EnginePair, aggregated: EngineProcess
) -> None:
    ids = prompt(100, 3)
    first = (await aggregated.run(ids, params(1))).token_ids[0]
    sampling = params(24, stop_token_ids=(first,))
    expected = joined(await aggregated.run(ids, sampling))
    assert await pair_shm.run(ids, sampling) == expected
    assert len(pair_shm.last) == 1
    await pair_shm.until_empty()


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
@pytest.mark.parametrize("shared", [BLOCK, 5 * BLOCK + 7])
async def test_prefix_hits_on_either_side_are_exact(
    pair_shm: EnginePair, aggregated: EngineProcess, where: str, shared: int
) -> None:
    prefix = prompt(shared, 1000 * len(where) + shared)
    sampling = params(ignore_eos=True)
    if where in {"prefill", "both"}:
        await pair_shm.prefill.run(prefix + prompt(9), params(1))
    if where in {"decode", "both"}:
        await pair_shm.decode.run(prefix + prompt(9), params(1))
    ids = prefix + prompt(50, 9)
    expected = joined(await aggregated.run(ids, sampling))
    assert await pair_shm.run(ids, sampling) == expected
    cached = pair_shm.last[0].report
    moved = pair_shm.last[1].report
    assert cached is not None
    assert moved is not None
    assert moved.transfer is not None
    held = shared // BLOCK
    if where != "decode":
        assert cached.cached_tokens == held * BLOCK
    total = -(-len(ids) // BLOCK)
    # Only what the decode worker lacks travels.
    assert moved.transfer.blocks == (total if where == "prefill" else total - held)
    await pair_shm.until_empty()


async def test_cached_kv_of_an_answer_goes_back_and_none_is_computed_for_it(
    pair: EnginePair, aggregated: EngineProcess
) -> None:
    """The second turn of a conversation computes what the user added, and neither the first prompt
    nor its answer. What is not cached is not computed for a copy either."""
    sampling, user = params(70, ignore_eos=True), prompt(20, 8)
    first = prompt(100, 1001 + len(pair.decode.addresses[0]))
    told = [*first, *(await pair.run(first, sampling)).token_ids]
    known = (len(told) - 1) // BLOCK * BLOCK
    for missing in (True, False):
        transfer_id = f"back-{pair.decode.instance_id}-{missing}"
        ids = (prompt(300, 7) if missing else told)[: known + 1]
        copied = PrefillPhase(transfer_id, min_cached_tokens=known)
        streams = (
            pair.decode.submit(ids, params(2, ignore_eos=True), copied),
            pair.prefill.submit(
                ids, params(2, ignore_eos=True), pair.decode.decode_phase(transfer_id)
            ),
        )
        sent, received = (
            await pair.decode.collect(streams[0]),
            await pair.prefill.collect(streams[1]),
        )
        errors = [x.error and x.error.code for x in (sent, received)]
        assert errors == (["transfer_failed"] * 2 if missing else [None] * 2)
        assert not (missing and sent.token_ids)
    second = [*told, *user]
    expected = joined(await aggregated.run(second, sampling))
    assert await pair.run(second, sampling) == expected
    report = pair.last[0].report
    assert report is not None
    assert report.cached_tokens == known
    await pair.until_empty()


async def test_many_at_once_are_exact(pair: EnginePair, aggregated: EngineProcess) -> None:
    """Concurrent requests of different lengths and kinds give their own answers."""
    kinds = [{}, *KINDS.values()]
    jobs = [
        (prompt(7 + 61 * i, 5), params(20, **{"ignore_eos": True, **kinds[i % len(kinds)]}))
        for i in range(12)
    ]
    expected = [joined(await aggregated.run(ids, sampling)) for ids, sampling in jobs]
    streams = [pair.submit(ids, sampling) for ids, sampling in jobs]
    found = await asyncio.gather(*(pair.collect(s) for s in streams))
    assert list(found) == expected
    await pair.until_empty()


@pytest.mark.parametrize("kind", ["greedy", *KINDS])
@pytest.mark.parametrize("by", ["decode", "aggregated"])
async def test_an_answer_resumed_elsewhere_is_exact(
    pair_shm: EnginePair, aggregated: EngineProcess, kind: str, by: str
) -> None:
    """What the fallback relies on: the tokens so far, and everything after them as if
    uninterrupted."""
    ids, sampling = prompt(80, 11), params(24, **KINDS.get(kind, {}))
    whole = await aggregated.run(ids, sampling)
    after = 7 if len(whole.token_ids) > 7 else 1  # a few kinds end early
    if len(whole.token_ids) == after:
        return
    worker = pair_shm.decode if by == "decode" else aggregated
    tail = await worker.run(ids, sampling, resume=whole.token_ids[:after])
    assert tail.token_ids == whole.token_ids[after:]
    assert whole.text.endswith(tail.text)
    assert tail.logprobs == whole.logprobs[after:]
    assert tail.finish_reason == whole.finish_reason
    await pair_shm.until_empty()
    await aggregated.until_empty()
