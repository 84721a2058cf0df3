"""vLLM's KV events match its prefix cache block for block: for prefill, decode and aggregated work,
concurrent or not, and with evictions."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from pdserve.model import prefix_hash
from pdserve.types import SamplingParams
from tests.support.engines import EngineProcess, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.engine_pair import EnginePair
    from tests.support.engines import EngineAnswer

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32
# Of the engine whose blocks do not last; a block takes 128 KiB.
FEW_BLOCKS = 40


def tokens(count: int, seed: object) -> list[int]:
    rng = random.Random(f"prefix/{seed}")
    return [rng.randrange(3, 400) for _ in range(count)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def reported(answer: EngineAnswer) -> int:
    assert answer.report is not None
    return answer.report.cached_tokens


async def test_both_workers_of_a_pair_hold_what_their_events_say(pair_shm: EnginePair) -> None:
    system = tokens(256, "system")
    prompts = [
        tokens(256, "system")[:length] + tokens(tail, seed)
        for seed, (length, tail) in enumerate(
            [(256, 40), (256, 40), (256, 0), (257, 0), (128, 100), (100, 30), (31, 1), (256, 300)]
        )
    ]
    hits = 0
    # The last ones again: all but the block of the last token is there.
    for prompt in [*prompts, prompts[0], prompts[-1]]:
        on_prefill = await pair_shm.prefill.expected_hit(prompt)
        on_decode = await pair_shm.decode.expected_hit(prompt)
        await pair_shm.run(prompt, params(40))
        first, rest = pair_shm.last
        assert reported(first) == on_prefill
        assert rest.report is not None
        assert rest.report.transfer is not None
        # Decode has the rest of its own.
        assert rest.report.transfer.blocks == -(-len(prompt) // BLOCK) - on_decode // BLOCK
        hits += bool(on_prefill) + bool(on_decode)
    assert hits >= 12
    # Generated tokens make blocks too, that a next turn of a conversation can use.
    answer = system + tokens(40, 0)
    tail = await pair_shm.run(answer, params(40))
    turn = answer + list(tail.token_ids)
    assert await pair_shm.decode.expected_hit(turn) > len(answer)
    await pair_shm.until_empty()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.start(
        settings(
            tiny_model,
            max_model_len=512,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=FEW_BLOCKS * (128 << 10),
        )
    )
    yield engine
    await engine.close()


async def test_evicted_blocks_are_known_to_be_gone(small: EngineProcess) -> None:
    rng = random.Random(5)
    evicted = hits = 0
    seen: list[list[int]] = []
    for turn in range(28):
        length, answer = rng.randrange(40, 350), rng.choice((1, 20))
        prompt = tokens(rng.choice((0, 64, 128)), rng.randrange(3)) + tokens(length, turn % 13)
        if seen and rng.random() < 0.5:
            prompt = rng.choice(seen)
        expected = await small.expected_hit(prompt)
        assert reported(await small.run(prompt, params(answer))) == expected
        hits += bool(expected)
        evicted += prompt in seen and expected < (len(prompt) - 1) // BLOCK * BLOCK
        seen.append(prompt)
    assert hits > 5
    assert evicted > 0
    assert len(await small.cached_blocks()) < FEW_BLOCKS


async def test_blocks_that_chain_hashes_do_not_identify_are_left_out() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    from workers.cache.mirror import CacheMirror
    from workers.vllm.cache.events import CacheEvents

    held = {b"a": object(), b"b": object(), b"c": object(), b"d": object()}
    pool = SimpleNamespace(medium="GPU", get_cached_block=lambda key, groups: held.get(key))
    events = CacheEvents(CacheMirror("m", 2), pool, 2)

    def stored(key: bytes, parent: bytes | None, **more: object) -> BlockStored:
        values = {"block_size": 2, "lora_id": None, "lora_name": None, "medium": "GPU", **more}
        return BlockStored([key], parent, [1, 2], **values)

    def told(*batch: object) -> tuple[int, int]:
        events.publish(KVEventBatch(ts=0.0, events=list(batch)))
        change = events.take()
        return (0, 0) if change is None else (len(change.removed), len(change.stored))

    embeddings = stored(b"a", None, extra_keys=[(b"digest",)])
    assert told(embeddings, stored(b"b", b"a"), stored(b"d", None, medium="CPU")) == (0, 0)
    adapter = {"lora_id": 1, "lora_name": "x@1"}
    events.publish(
        KVEventBatch(ts=0.0, events=[stored(b"e", None, **adapter, extra_keys=[("x@1", "salt")])])
    )
    change = events.take()
    assert change is not None
    assert list(change.stored) == prefix_hash.chain(
        [1, 2], 2, prefix_hash.root("m", 2, "x@1", "salt")
    )
    assert told(stored(b"c", None, **adapter, extra_keys=[("x@1",)])) == (0, 1)
    picture = stored(b"p", None, **adapter, extra_keys=[("x@1", ("image", 1), "salt")])
    events.publish(KVEventBatch(ts=0.0, events=[picture]))
    change = events.take()
    assert change is not None
    assert list(change.stored) == prefix_hash.chain(
        [1, 2], 2, prefix_hash.root("m", 2, "x@1", "salt"), media={0: [("image", 1)]}
    )
    assert told(stored(b"a", None, extra_keys=[None]), stored(b"b", b"a")) == (0, 2)
    # Another block holds the same tokens still.
    assert told(BlockRemoved([b"b"], "GPU", 0)) == (0, 0)
    del held[b"b"]
    assert told(BlockRemoved([b"b"], "GPU", 0)) == (1, 0)
    assert told(AllBlocksCleared()) == (4, 0)
    assert events.take() is None
