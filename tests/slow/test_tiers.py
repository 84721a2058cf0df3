"""Tiers below the KV cache on real vLLM. Evicted blocks return exactly from host memory and files,
also to other workers and after a restart, and never to another model."""

from __future__ import annotations

import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from pdserve.config import RouterConfig, TiersConfig
from pdserve.net import rpc
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub
from tests.support.engine_pair import BLOCK, EnginePair, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import make_kind
from tests.support.timeouts import WAIT_S, wait_until
from tests.support.tiny_models import ModelSpec, make_model
from tests.support.vllm_cluster import OpenRequest, VllmCluster

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
        name: str = "", folder: Path | None = None, model: Path = tiny_model
    ) -> EngineProcess:
        made = settings(
            model,
            kv=ConnectorConfig() if name else None,
            instance_id=name,
            tiers=TiersConfig(
                host_gib=1 / 32, disk_path=str(folder or ""), disk_gib=1 / 16 if folder else 0
            ),
            kv_cache_memory_bytes=CACHE_BYTES,
            max_num_batched_tokens=256,
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
    assert [await ask(first, number, expected) for number in range(2)] == [0, 0]
    await until_stored(folder, 2)
    other = await start("", folder)
    assert [await ask(other, number, expected) for number in range(2)] == [BLOCKS] * 2
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
    config = RouterConfig(http_port=0, grpc_port=0, policy="least_loaded", stop_grace_s=0.0)
    tiers = f"{{host_gib: 0.03125, disk_path: {folder}, disk_gib: 0.0625}}"
    async with VllmCluster.start(config, tiny_model) as service:
        await service.add("decode-0")
        for cached in (0, BLOCKS * BLOCK):
            await service.add("prefill-0", tiers=tiers)
            await service.until_ready()
            asked = OpenRequest(service, PROMPTS[0], params())
            (answer,) = await asked.end()
            assert answer.token_ids == expected[0]
            assert asked.last is not None
            assert asked.last.usage is not None
            assert asked.last.usage.cached_tokens == cached
            assert asked.receipt.prefill_worker == "prefill-0"
            await until_stored(folder, 1)
            await service.until_empty()
            service.send("prefill-0", signal.SIGTERM)
            assert await service.ended("prefill-0") == 0


async def test_an_evicted_prompt_goes_to_the_worker_with_its_blocks_in_host_memory(
    tiny_model: Path,
) -> None:
    """The cache of a worker has room for three of the prompts, its host memory for all."""
    config = RouterConfig(http_port=0, grpc_port=0, policy="prefix_aware", stop_grace_s=0.0)
    length = ", max_model_len: 1024"
    async with VllmCluster.start(config, tiny_model) as service:
        for name in ("prefill-0", "prefill-1"):
            args = f"{length}, num_gpu_blocks_override: 60"
            await service.add(name, tiers="{host_gib: 0.0625}", engine_args=args)
        await service.add("decode-0", engine_args=length)
        await service.until_ready()

        async def ask(number: int) -> tuple[str, int, str]:
            """Return the prefill worker of a prompt, the tokens that it did not compute, and the
            request's id."""
            asked = OpenRequest(service, prompt(LENGTH, number), params())
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
