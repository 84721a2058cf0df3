"""The blocks of a session stay cached between two turns on real vLLM, and are in nobody's way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from pdserve.config import SessionRetentionConfig
from tests.support.engine_pair import BLOCK, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import make_kind
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")

# 39 blocks of 128 KiB, and the null block.
CACHE_BYTES, BLOCKS = 5 << 20, 39
TURN = 16  # blocks
# Retention does not end by its time: whatever waited for one would fail the test.
LONG_S = 3600.0


@pytest_asyncio.fixture(loop_scope="session")
async def small(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    """Start a decode engine whose cache holds two of the prompts, not three."""
    engine = await EngineProcess.start(
        settings(
            tiny_model,
            kv=ConnectorConfig(),
            instance_id="decode-small",
            retention=SessionRetentionConfig(share=0.5, max_s=LONG_S),
            kv_cache_memory_bytes=CACHE_BYTES,
            max_num_batched_tokens=256,
            max_model_len=(BLOCKS - 1) * BLOCK,
        )
    )
    yield engine
    await engine.close()


async def retained_blocks(engine: EngineProcess) -> int:
    load, _ = await engine.status()
    assert load is not None
    return load.session_blocks


async def serve_others(engine: EngineProcess, first_seed: int) -> None:
    """Serve prompts that take more blocks than the cache has."""
    for seed in range(first_seed, first_seed + 4):
        await engine.run(prompt(TURN * BLOCK, seed), params())


async def test_turns_find_their_history_cached_and_no_request_waits_for_it(
    small: EngineProcess, aggregated: EngineProcess, prefill: EngineProcess
) -> None:
    # Without a session, other requests displace the history.
    first = prompt(TURN * BLOCK + 7, 1)
    made = (await small.run(first, params())).token_ids
    await serve_others(small, 100)
    second = [*first, *made, *prompt(40, 2)]
    lost = await small.run(second, params())
    assert lost.report is not None
    assert lost.report.cached_tokens == 0

    # With one they do not, and the answer is the same as without a cache.
    first = prompt(TURN * BLOCK + 7, 3)
    made = (await small.run(first, params(), next_turn_s=LONG_S)).token_ids
    assert await retained_blocks(small) == TURN
    await small.until_empty()
    await serve_others(small, 200)
    second = [*first, *made, *prompt(40, 4)]
    kept = await small.run(second, params(), next_turn_s=LONG_S)
    assert kept.report is not None
    assert kept.report.cached_tokens == TURN * BLOCK
    assert kept.token_ids == (await aggregated.run(second, params())).token_ids
    assert await retained_blocks(small) == len([*second, *kept.token_ids]) // BLOCK

    # A request that needs all blocks gets them while blocks are retained.
    whole = prompt((BLOCKS - 2) * BLOCK, 5)
    answer = await small.run(whole, params())
    assert answer.token_ids == (await aggregated.run(whole, params())).token_ids
    assert await retained_blocks(small) == 1, "the block that it did not need"
    load, _ = await small.status()
    assert load is not None
    assert load.retentions_ended == {"returned": 1}

    # A turn that is aborted is not retained.
    stream = small.submit(prompt(TURN * BLOCK, 6), params(700), next_turn_s=LONG_S)
    await small.until(lambda: small.answer(stream).token_ids)
    small.cancel(stream)
    await small.until_empty()
    assert await retained_blocks(small) <= 1

    # What a decode engine received and generated can be copied from it after other requests.
    first = prompt(TURN * BLOCK - 7, 7)
    decode = prefill.decode_phase("turn")
    stream = small.submit(first, params(), decode, next_turn_s=LONG_S)
    await prefill.run(first, params(), PrefillPhase("turn"))
    made = (await small.collect(stream)).token_ids
    await serve_others(small, 300)
    history = [*first, *(await prefill.run(first, params(1))).token_ids, *made]
    copy = PrefillPhase("copy", min_cached_tokens=TURN * BLOCK)
    stream = prefill.submit(history, params(2), small.decode_phase("copy"))
    assert (await small.run(history, params(2), copy)).error is None
    copied = await prefill.collect(stream)
    assert copied.error is None
    for engine in (small, prefill):
        await engine.until_empty()


async def test_a_turn_of_a_model_with_windows_keeps_what_the_next_one_looks_up(
    tmp_path: Path,
) -> None:
    """The next turn needs all blocks of one kind of layers, and of the other the last window."""
    model = await make_kind(tmp_path / "model", "Gemma-2")
    engine = await EngineProcess.start(
        settings(
            model,
            retention=SessionRetentionConfig(max_s=LONG_S),
            kv_cache_memory_bytes=6 << 20,
            max_num_batched_tokens=256,
            max_model_len=600,
        )
    )
    try:
        first = prompt(400)
        made = (await engine.run(first, params(), next_turn_s=LONG_S)).token_ids
        for seed in range(1, 2 + engine.info.total_blocks // 13):
            await engine.run(prompt(400, seed), params())
        second = await engine.run([*first, *made, *prompt(30)], params())
        assert second.report is not None
        assert second.report.cached_tokens == 12 * BLOCK
        await engine.until_empty()
    finally:
        await engine.close()
