"""Tiers below the KV cache on real vLLM. Evicted blocks return exactly from host memory and files,
also to other workers and after a restart, and never to another model."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from pdserve.config import TiersConfig
from pdserve.net import rpc
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster import Cluster
from tests.support.engine_pair import BLOCK, CHUNK, EnginePair, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import make_kind
from tests.support.started_workers import vllm
from tests.support.timeouts import WAIT_S, wait_until
from tests.support.tiny_models import ModelSpec, make_model
from workers.engine import PrefillPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Start = Callable[..., Awaitable[EngineProcess]]

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1 << 20
# 40 blocks of 128 KiB: two of the prompts, not four.
CACHE_BYTES = 5 * MIB
BLOCKS = 16
LENGTH = BLOCKS * BLOCK + 7
PROMPTS = [prompt(LENGTH, seed) for seed in range(4)]
SHARED_MEMORY = Path("/dev/shm")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(aggregated: EngineProcess) -> list[tuple[int, ...]]:
    """Return the answers of an engine without tiers."""
    return [(await aggregated.run(x, params())).token_ids for x in PROMPTS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest_asyncio.fixture(loop_scope="session")
async def start(tiny_model: Path) -> AsyncIterator[Start]:
    """Starts engines, which end with the test and leave no shared memory."""
    engines: list[EngineProcess] = []

    async def begin(
        name: str = "",
        folder: Path | None = None,
        model: Path = tiny_model,
        cache: int = CACHE_BYTES,
        host_gib: float = 1 / 32,
        chunk: int = CHUNK,
    ) -> EngineProcess:
        made = settings(
            model,
            kv=ConnectorConfig() if name else None,
            instance_id=name,
            tiers=TiersConfig(
                host_gib=host_gib, disk_path=str(folder or ""), disk_gib=1 / 16 if folder else 0
            ),
            kv_cache_memory_bytes=cache,
            max_num_batched_tokens=chunk,
            max_model_len=1024,
        )
        engines.append(await EngineProcess.start(made))
        return engines[-1]

    yield begin
    for engine in engines:
        await engine.close()
    for engine in engines:
        assert list(SHARED_MEMORY.glob(f"vllm_offload_pdserve-{engine.pid}-*")) == []


async def ask(
    engine: EngineProcess | EnginePair, number: int, expected: list[tuple[int, ...]]
) -> int:
    """Return the cached blocks of a prompt whose answer is that of an engine without tiers."""
    answer: Any = await engine.run(PROMPTS[number], params())
    assert answer.token_ids == expected[number]
    report = (engine.last[0] if isinstance(engine, EnginePair) else answer).report
    assert report.cached_tokens % BLOCK == 0
    return int(report.cached_tokens) // BLOCK


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*/*/*"))


async def until_stored(folder: Path, prompts: int) -> None:
    await wait_until(lambda: len(files(folder)) >= prompts * BLOCKS)


async def test_host_memory_returns_what_the_cache_evicted(
    start: Start, expected: list[tuple[int, ...]]
) -> None:
    pair = EnginePair(await start("p"), await start("d"), "p")
    assert [await ask(pair, number, expected) for number in range(4)] == [0] * 4
    assert [await ask(pair, number, expected) for number in range(4)] == [BLOCKS] * 4
    streams = [pair.submit(each, params()) for each in PROMPTS]
    assert [(await pair.collect(each)).token_ids for each in streams] == expected
    await pair.until_empty()


async def test_files_serve_other_workers_and_outlive_a_kill(
    start: Start, expected: list[tuple[int, ...]], folder: Path
) -> None:
    first = await start("", folder)
    unstored = first.submit(PROMPTS[3], params(), no_tiers=True)
    assert (await first.collect(unstored)).token_ids == expected[3]
    assert [await ask(first, number, expected) for number in range(2)] == [0, 0]
    await until_stored(folder, 2)
    other = await start("", folder)
    assert [await ask(other, number, expected) for number in (3, 0, 1)] == [0, BLOCKS, BLOCKS]
    other.submit(PROMPTS[2], params())
    await other.kill()
    assert list(SHARED_MEMORY.glob(f"vllm_offload_pdserve-{other.pid}-*")) == []
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {0o600, 0o700}
    stale = SHARED_MEMORY / f"vllm_offload_pdserve-{other.pid}-killed-while-it-started.mmap"
    stale.touch()
    restarted = await start("", folder)
    assert not stale.exists()
    assert [await ask(restarted, number, expected) for number in range(4)][:2] == [BLOCKS] * 2


async def test_a_restarted_prefill_worker_of_a_service_has_its_prefixes(
    tiny_model: Path, expected: list[tuple[int, ...]], folder: Path
) -> None:
    tiers = {"host_gib": 0.03125, "disk_path": str(folder), "disk_gib": 0.0625}
    async with Cluster(engine=vllm(tiny_model)) as service:
        await service.add("decode-0")
        for cached in (0, BLOCKS * BLOCK):
            await service.add("prefill-0", kv={"tiers": tiers})
            await service.until_ready()
            asked = service.open(PROMPTS[0], params())
            (answer,) = await asked.end()
            assert answer.token_ids == expected[0]
            assert asked.last is not None
            assert asked.last.usage is not None
            assert asked.last.usage.cached_tokens == cached
            assert asked.receipt.prefill_worker == "prefill-0"
            await until_stored(folder, 1)
            await service.until_empty()
            assert await service.end("prefill-0") == 0


async def test_an_evicted_prompt_goes_to_the_worker_with_its_blocks_in_host_memory(
    tiny_model: Path,
) -> None:
    """The cache of a worker has room for three of the prompts, its host memory for all."""
    async with Cluster(
        engine=vllm(tiny_model),
        engine_args={"max_model_len": 1024},
        router={"policy": "prefix_aware"},
    ) as service:
        tiers = {"host_gib": 0.0625}
        for name in ("prefill-0", "prefill-1"):
            few = {"num_gpu_blocks_override": 60}
            await service.add(name, kv={"tiers": tiers}, engine_args=few)
        await service.add("decode-0")
        await service.until_ready()

        async def ask(number: int) -> tuple[str, int, str]:
            """Return the prefill worker of a prompt, the tokens that it did not compute, and the
            request's id."""
            asked = service.open(prompt(LENGTH, number), params())
            await asked.end()
            assert asked.last is not None
            assert asked.last.usage is not None
            await service.until_empty()
            cached = asked.last.usage.cached_tokens
            return asked.receipt.prefill_worker, cached, asked.last.request_id

        first = [await ask(number) for number in range(12)]
        assert {cached for _, cached, _ in first} == {0}
        assert len({worker for worker, _, _ in first}) == 2
        again = [await ask(number) for number in range(6)]
        holders = [worker for worker, _, _ in first[:6]]
        assert [answer[:2] for answer in again] == [(x, BLOCKS * BLOCK) for x in holders]
        async with rpc.open_channel(service.grpc) as channel:
            request = a.ExplainRequest(request_id=again[-1][2])
            found = await AdminStub(channel).Explain(request, timeout=WAIT_S)
        in_tiers = [c.worker_id for c in found.decisions[0].candidates if c.tier_tokens]
        assert in_tiers == holders[-1:]


async def test_kv_received_in_blocks_of_an_ended_prompt_does_not_reach_the_tier(
    start: Start,
) -> None:
    """A prompt is cancelled while it is computed, and its blocks go to KV from another worker."""
    source = await start("s", cache=64 * MIB)
    tiered = await start("t", host_gib=1 / 8, chunk=CHUNK // 2)
    right, found = [], []
    for n in range(8):
        cut, moved = prompt(22 * BLOCK, 1000 + n), prompt(30 * BLOCK - 1, 5000 + n)
        again = [*cut, *prompt(5, n)]
        right.append((await source.run(again, params(12, ignore_eos=True))).token_ids)
        assert (await source.run(moved, params(1), PrefillPhase(f"b{n}"))).error is None
        # Leaves room for the cut prompt alone, and shows the engine's steps.
        longest = 56
        filler = tiered.submit(prompt(6 * BLOCK, 9000 + n), params(longest, ignore_eos=True))
        steps = tiered.answer(filler)
        await tiered.until(lambda steps=steps: len(steps.token_ids) > 2)
        first = tiered.submit(cut, params(1), PrefillPhase(f"a{n}"))
        # On a busy machine the filler may end before this process hears of its first tokens.
        end = min(len(steps.token_ids) + 2 + n % 3, longest)
        second = tiered.submit(moved, params(2, ignore_eos=True), source.decode_phase(f"b{n}"))
        await tiered.until(lambda steps=steps, end=end: len(steps.token_ids) >= end)
        tiered.cancel(first)
        assert (await tiered.collect(second)).error is None
        await tiered.collect(filler)
        for other in range(3):  # evict the cut prompt from the KV cache
            await tiered.run(prompt(20 * BLOCK, 20000 + 10 * n + other), params(1))
        found.append(await tiered.run(again, params(12, ignore_eos=True)))
    assert [x.token_ids for x in found] == right
    assert any(x.report is not None and x.report.cached_tokens for x in found)


async def test_another_model_of_the_same_name_finds_nothing(
    start: Start, expected: list[tuple[int, ...]], folder: Path, tmp_path: Path, tiny_model: Path
) -> None:
    first = await start("", folder)
    assert await ask(first, 0, expected) == 0
    await until_stored(folder, 1)
    namesake = make_model(tmp_path / tiny_model.name, ModelSpec(seed=1))
    other = await start("", folder, namesake)
    answer = await other.run(PROMPTS[0], params())
    assert answer.report is not None
    assert answer.report.cached_tokens == 0
    assert answer.token_ids != expected[0]


async def test_windows_beside_full_attention_come_from_files(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    model = await make_kind(tmp_path / "model", "Gemma-2")
    answers, cached = [], []
    for _ in range(2):
        engine = await start("", folder, model)
        answer = await engine.run(PROMPTS[0], params())
        assert answer.report is not None
        answers.append(answer.token_ids)
        cached.append(answer.report.cached_tokens)
        await until_stored(folder, 1)
    assert answers[0] == answers[1]
    assert cached == [0, BLOCKS * BLOCK]
