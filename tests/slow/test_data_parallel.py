"""Ranks of a data-parallel group share the experts of a model, and each is a worker of its own.
Their answers are those of one engine, and they fail and end as one."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from pdserve.config import DataParallelConfig
from pdserve.deploy.local.groups import free_ports
from tests.support.engine_pair import BLOCK, EnginePair, joined, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import make_kind
from tests.support.model_matrix import EXACT, EXPERTS, SHARED, check_kind
from tests.support.pdserve_up import up
from tests.support.served_up import ServedUp
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")
_SEEDS = itertools.count(1)
_ARGS = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "block_size": BLOCK}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with four experts, two of which compute each token."""
    return await make_kind(tmp_path_factory.mktemp("models") / "moe", "Qwen3-MoE")


async def _group(model: Path, env: Mapping[str, str] | None = None) -> list[EngineProcess]:
    """Start two ranks, each with half of the experts."""
    port, kv = free_ports("127.0.0.1"), ConnectorConfig(transports=("shm", "tcp"))
    ranks = []
    for rank in range(2):
        one = settings(
            model, kv=kv, instance_id=f"rank-{rank}", enable_expert_parallel=True, **_ARGS
        )
        ranks.append(
            replace(
                one,
                data_parallel=DataParallelConfig(size=2, rank=rank, port=port, group="g"),
                leave_s=WAIT_S,
            )
        )
    return await asyncio.gather(*(EngineProcess.start(each, env=env) for each in ranks))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(model: Path) -> AsyncIterator[EngineProcess]:
    """Start an engine with all experts."""
    kv = ConnectorConfig(transports=("shm", "tcp"))
    engine = await EngineProcess.start(settings(model, kv=kv, instance_id="plain", **_ARGS))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks(model: Path) -> AsyncIterator[list[EngineProcess]]:
    """Start ranks with asynchronous scheduling, as on a GPU; those of the other tests have none."""
    engines = await _group(model, {"PDSERVE_TEST_ASYNC_SCHEDULING": "1"})
    assert {x.info.settings["async_scheduling"] for x in engines} == {"True"}
    yield engines
    for engine in engines:
        await engine.kill()


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [("plain", "rank-0"), ("plain", "rank-1"), ("rank-0", "plain"), ("rank-1", "rank-0")],
)
async def test_hand_overs_are_exact(
    plain: EngineProcess, ranks: list[EngineProcess], producer: str, consumer: str
) -> None:
    by_name = {engine.instance_id: engine for engine in (plain, *ranks)}
    pair = EnginePair(by_name[producer], by_name[consumer], producer)
    sampling, seed = params(ignore_eos=True), next(_SEEDS)
    prompts = [prompt(length, seed) for length in (3, BLOCK + 1, 257, 700)]
    expected = [joined(await plain.run(ids, sampling)).token_ids for ids in prompts]
    # One at a time: the other ranks make dummy steps. Together: all have tokens.
    assert [(await pair.run(ids, sampling)).token_ids for ids in prompts] == expected
    together = await asyncio.gather(*(pair.run(ids, sampling) for ids in prompts))
    assert [answer.token_ids for answer in together] == expected
    for engine in by_name.values():
        await engine.until_empty()


@pytest.mark.parametrize("name", SHARED)
async def test_kinds_of_models_share_their_experts_exactly(name: str) -> None:
    assert await asyncio.to_thread(check_kind, name, EXPERTS) == {EXPERTS: EXACT}


async def test_all_ranks_at_once_are_exact(
    plain: EngineProcess, ranks: list[EngineProcess]
) -> None:
    sampling = params(24, ignore_eos=True)
    prompts = [prompt(length, next(_SEEDS)) for length in (9, 300, 600, 40)]
    expected = [(await plain.run(ids, sampling)).token_ids for ids in prompts]
    runs = [ranks[i % 2].run(ids, sampling) for i, ids in enumerate(prompts)]
    assert [answer.token_ids for answer in await asyncio.gather(*runs)] == expected


async def test_a_rank_that_ends_first_serves_the_others_until_they_end(
    plain: EngineProcess, ranks: list[EngineProcess]
) -> None:
    ids, sampling = prompt(300, next(_SEEDS)), params(40, ignore_eos=True)
    expected = (await plain.run(ids, sampling)).token_ids
    first = asyncio.create_task(ranks[0].close())
    assert (await ranks[1].run(ids, sampling)).token_ids == expected
    assert not first.done()
    await ranks[1].close()
    await first


async def test_an_idle_rank_notices_that_another_has_died(model: Path) -> None:
    ranks = await _group(model)
    try:
        await ranks[0].run(prompt(40), params(4))
        await ranks[1].kill()
        await ranks[0].until(lambda: ranks[0].failure is not None)
        assert "rank 1 of this data-parallel group has ended" in str(ranks[0].failure)
    finally:
        for rank in ranks:
            await rank.kill()


async def check_drains(service: ServedUp, ask: dict[str, Any], whole: list[int]) -> None:
    """Drain a rank before an answer, which the other gives, and then the other in the answer, which
    continues on the first with its KV. Experts of both compute its tokens."""
    await service.drain("decode-1")
    assert await service.command("drain", "decode-1", "--stop", "--force") == 1
    tokens, is_drained = list[int](), False
    async with service.client() as client:
        async for part in await client.completions.create(**ask, stream=True):
            tokens += (part.choices[0].model_extra["token_ids"] or ()) if part.choices else ()
            if not is_drained and len(tokens) >= 10:
                await service.undrain("decode-1")
                await service.drain("decode-0", timeout_s=0.0)
                is_drained = True
    assert tokens == whole
    await service.undrain("decode-0")
    for worker in service.ready["workers"]:
        async with aiohttp.ClientSession() as session:
            page = await (await session.get(f"http://{worker['debug']}/metrics")).text()
        loads = re.findall(r"^pdserve_worker_expert_tokens_total{.*} (.+)$", page, re.MULTILINE)
        assert [float(x) > 0 for x in loads] == [True] * (worker["worker_id"] != "prefill-0")


async def test_a_group_restarts_as_one_and_its_answers_continue_elsewhere(
    model: Path, tmp_path: Path
) -> None:
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    words = ["--engine", "vllm", "--model", str(model), "--model-name", "moe"]
    words += ["--set", f"worker.engine_args={json.dumps(args)}"]
    words += ["--set", "up.decode.data_parallel_size=2"]
    words += ["--set", 'up.decode.engine_args={"enable_expert_parallel": true}']
    with up(tmp_path, *words) as running:
        service = ServedUp(running)
        statuses = await service.statuses()
        assert {name: x.info.group for name, x in statuses.items()} == {
            "prefill-0": "",
            "decode-0": "decode-0",
            "decode-1": "decode-0",
        }
        before = {name: x.info.instance_id for name, x in statuses.items()}
        ask = {
            "model": "moe",
            "prompt": prompt(100),
            "temperature": 0.0,
            "max_tokens": 100,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        async with service.client() as client:
            whole = await client.completions.create(**ask)
            await check_drains(service, ask, whole.choices[0].model_extra["token_ids"])
            tokens, lives = list[int](), True
            async for part in await client.completions.create(**ask, stream=True):
                tokens += (part.choices[0].model_extra["token_ids"] or ()) if part.choices else ()
                if lives and len(tokens) >= 10:
                    os.kill(statuses["decode-1"].info.pid, signal.SIGKILL)
                    lives = False
        assert tokens == whole.choices[0].model_extra["token_ids"]
        running.wait_for_line("decode-0", "is back", within_s=START_S)
        running.wait_for_line("decode-1", "is back", within_s=START_S)
        service.ready = json.loads(running.ready_path.read_text())
        again = {x: y.info.instance_id for x, y in (await service.statuses()).items()}
        assert {name for name in before if again[name] != before[name]} == {"decode-0", "decode-1"}
        assert not psutil.pid_exists(statuses["decode-0"].info.pid)
        async with service.client() as client:
            after = await client.completions.create(**ask)
        assert after.choices[0].model_extra["token_ids"] == tokens
        running.send(signal.SIGTERM)
        assert running.wait() == 0
