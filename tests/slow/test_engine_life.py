"""How engines start and end, and what is left of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.types import FinishReason, SamplingParams
from tests.support.engines import EngineProcess, settings
from tests.support.timeouts import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="session")
PROMPT = tuple(range(5, 60))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def shared_by_ranks() -> set[Path]:
    """Return the memory of vLLM's CPU ranks that has a name."""
    return set(Path("/dev/shm").glob("vllm_dist_*-cpushm_*"))


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def gone(processes: list[psutil.Process]) -> None:
    """Waits until `processes` have ended."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=WAIT_S)
    assert alive == []


async def test_a_start_leaves_nothing_and_a_close_ends_streams_and_threads(
    tiny_model: Path,
) -> None:
    engine = await EngineProcess.start(settings(tiny_model, kv_cache_memory_bytes=3 << 30))
    assert children(engine.pid) == []
    assert psutil.Process(engine.pid).memory_info().rss < 2 << 30, "the cache fills with requests"
    load, ledger = await engine.until_empty()
    assert load is not None
    assert (load.progress, ledger.is_empty) == (0, True)
    await engine.run(PROMPT, GREEDY)
    computed = len(PROMPT) + GREEDY.max_tokens - 1
    assert len(await engine.cached_blocks()) == computed // engine.info.block_size > 0
    stream = engine.submit(PROMPT, ENDLESS)
    await engine.until(lambda: bool(engine.answer(stream).token_ids))
    # The first one may have ended by the time this process hears of its first token.
    stream = engine.submit(PROMPT, ENDLESS)
    assert await engine.close() == []
    answer = engine.answer(stream)
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert answer.error.code == "unavailable"


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"nonsense": 1}, "engine_args.nonsense"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"pipeline_parallel_size": 2, "speculative_config": NGRAM}, "pipeline_parallel_size 2"),
    ],
)
async def test_an_engine_that_cannot_start_reports_the_reason(
    tiny_model: Path, engine_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        await EngineProcess.start(settings(tiny_model, **engine_args))


async def test_two_ranks_answer_as_one_and_die_with_their_parent(
    tiny_model: Path, aggregated: EngineProcess
) -> None:
    shared = shared_by_ranks()
    engine = await EngineProcess.start(settings(tiny_model, tensor_parallel_size=2))
    ranks = children(engine.pid)
    forked = [rank for rank in ranks if rank.ppid() != engine.pid]
    assert len(forked) == 2, "ranks are forks of a fork, which need not import vLLM again"
    assert shared_by_ranks() <= shared
    found = await engine.run(PROMPT, GREEDY)
    assert found.token_ids == (await aggregated.run(PROMPT, GREEDY)).token_ids
    await engine.until_empty()
    await engine.kill()
    await gone(ranks)


async def test_a_rank_that_dies_fails_the_engine(tiny_model: Path) -> None:
    engine = await EngineProcess.start(settings(tiny_model, tensor_parallel_size=2))
    ranks = children(engine.pid)
    stream = engine.submit(PROMPT, ENDLESS)
    await engine.until(lambda: bool(engine.answer(stream).token_ids))
    rank = max(ranks, key=lambda rank: rank.pid)
    # No step ends any more, so the answer cannot end before the rank does.
    rank.suspend()
    stream = engine.submit(PROMPT, ENDLESS)
    rank.kill()
    await engine.until(lambda: engine.failure is not None)
    answer = await engine.collect(stream)
    assert answer.finish_reason is FinishReason.ERROR
    late = await engine.run(PROMPT, GREEDY)
    assert late.error is not None
    assert late.error.code == "worker_failed"
    await engine.close()
    await gone(ranks)
