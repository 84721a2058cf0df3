"""LoRA adapters on real vLLM behind a router. Every answer is that of one engine, also when workers
are killed or drained. A changed adapter counts as another adapter."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from pdserve.errors import InvalidRequest
from pdserve.model import prefix_hash
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from tests.support.cluster import Cluster
from tests.support.engine_pair import BLOCK, JoinedAnswer, joined, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.started_workers import vllm
from tests.support.timeouts import WAIT_S
from tests.support.tiny_models import make_adapter
from workers.control.loaded_adapters import read_adapter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


pytestmark = pytest.mark.asyncio(loop_scope="session")
# vLLM runs as many at a time, and takes no larger ones.
LORA = {"max_loras": 2, "max_lora_rank": 8}
MODEL = "tiny"


class Adapters:
    """Two adapters on disk, and an engine for their expected answers."""

    def __init__(self, directory: Path, engine: EngineProcess) -> None:
        self.directory = directory
        self.paths = {"red": directory / "red", "blue": directory / "blue"}
        self.engine = engine

    async def write(self, name: str, seed: int) -> None:
        """Write a revision of an adapter, and load it into the engine."""
        make_adapter(self.paths[name], seed)
        await self.engine.load_adapter(self._read(name))

    async def expected(self, name: str, ids: list[int], sampling: SamplingParams) -> JoinedAnswer:
        """Return the answer of one engine with the current files."""
        return joined(await self.engine.run(ids, sampling, adapter=self.key(name)))

    def key(self, name: str) -> str:
        return "" if name == MODEL else self._read(name).key

    def _read(self, name: str) -> Any:
        return read_adapter(name, str(self.paths[name]), MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapters(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Adapters]:
    engine = await EngineProcess.start(
        settings(tiny_model, enable_lora=True, max_num_batched_tokens=256, **LORA)
    )
    found = Adapters(tmp_path_factory.mktemp("adapters"), engine)
    await found.write("red", 1)
    await found.write("blue", 2)
    yield found
    await engine.close()


async def add(service: Cluster, adapters: Adapters, name: str) -> None:
    """Start a worker with `red` in its configuration."""
    await service.add(
        name,
        adapters={"red": str(adapters.paths["red"])},
        adapter_directories=[str(adapters.directory)],
        engine_args=LORA,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tiny_model: Path, adapters: Adapters) -> AsyncIterator[Cluster]:
    """Start one prefill and two decode workers, and load `blue` while they run."""
    async with Cluster(engine=vllm(tiny_model), router={"policy": "prefix_aware"}) as service:
        for name in ("prefill-0", "decode-0", "decode-1"):
            await add(service, adapters, name)
        await service.until_ready()
        said = await load(service, "blue", adapters.paths["blue"])
        assert said == (200, "Success: LoRA adapter 'blue' added successfully.")
        yield service


@pytest_asyncio.fixture(loop_scope="session")
async def service(running: Cluster) -> AsyncIterator[Cluster]:
    yield running
    await running.until_empty()


async def post(service: Cluster, path: str, body: dict[str, object]) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{service.url}/v1/{path}", json=body) as response,
    ):
        return response.status, await response.text()


async def load(service: Cluster, name: str, path: Path, **more: object) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await post(service, "load_lora_adapter", body)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


async def test_answers_between_those_of_the_model_are_those_of_one_engine(
    service: Cluster, adapters: Adapters
) -> None:
    ids, sampling = prompt(100, 7), greedy(24)
    names = (MODEL, "red", "blue")
    expected = [await adapters.expected(name, ids, sampling) for name in names]
    assert len({x.token_ids for x in expected}) == len(names)
    first = [service.open(ids, sampling, model=name) for name in names]
    assert [await x.end() for x in first] == [[x] for x in expected]
    # KV moved for each, and none found that of another in a cache.
    assert all(x.receipt.transfer_blocks and not x.receipt.cached_tokens for x in first)
    again = [service.open(ids, sampling, model=name) for name in names]
    assert [await x.end() for x in again] == [[x] for x in expected]
    assert all(x.receipt.cached_tokens for x in again)
    several = service.open(ids, replace(sampling, n=2), model="red")
    assert await several.end() == [expected[1]] * 2
    # Routers know its blocks of an adapter from those of the model.
    cached = await adapters.engine.cached_blocks()
    for name in names:
        root = prefix_hash.root(MODEL, BLOCK, adapters.key(name))
        assert cached.issuperset(prefix_hash.chain(ids, BLOCK, root))


async def test_vllms_metrics_have_the_names_that_requests_have(service: Cluster) -> None:
    await service.open(prompt(20, 9), greedy(24), model="red").end()
    await service.until_empty()
    listed = await service.listed()
    pages = ""
    async with aiohttp.ClientSession() as session:
        for info in [x.info for x in listed.workers if x.info.role == w.ROLE_DECODE]:
            async with session.get(f"http://{info.debug_address}/metrics") as response:
                page = await response.text()
            assert f'num_gpu_blocks="{info.total_blocks + 1}"' in page
            assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in page
            pages += page
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="red",' in pages


async def test_a_stream_moves_with_its_kv_when_its_worker_drains(
    service: Cluster, adapters: Adapters
) -> None:
    ids, sampling = prompt(80, 11), greedy(400)
    expected, is_moved = await adapters.expected("red", ids, sampling), False
    while not is_moved:  # the answer may end before the drain begins
        await service.drain("decode-1")
        asked = service.open(ids, sampling, model="red")
        await asked.until(20)
        await service.undrain("decode-1")
        await service.drain("decode-0")
        assert await asked.end() == [expected]
        assert asked.fallbacks in ((), ("live_kv:moved",))
        is_moved = bool(asked.fallbacks)
        await service.undrain("decode-0")


async def test_a_stream_continues_and_a_new_worker_has_what_is_served(
    service: Cluster, adapters: Adapters
) -> None:
    ids, sampling = prompt(80, 12), greedy(400)
    other, killed = "decode-0", "decode-1"
    await service.drain(other)
    # Stopped, it does not end the answer before it is killed, however fast the machine is.
    service.freeze(killed)
    asked = service.open(ids, sampling, model="blue")
    await asked.until(1)
    await service.undrain(other)
    await service.kill(killed)
    assert await asked.end() == [await adapters.expected("blue", ids, sampling)]
    assert len(asked.receipt.fallbacks) == 1
    # Its configuration does not have this adapter.
    await add(service, adapters, killed)
    await service.until_ready()
    async with asyncio.timeout(WAIT_S):
        while len((await service.entries())[killed].adapters) < 2:  # noqa: ASYNC110 - it is polled
            await asyncio.sleep(0.05)
    await service.drain(other)
    again = service.open(ids, sampling, model="blue")
    assert await again.end() == [await adapters.expected("blue", ids, sampling)]
    assert again.receipt.decode_worker == killed
    await service.undrain(other)


async def test_another_revision_is_another_adapter(service: Cluster, adapters: Adapters) -> None:
    ids, sampling = prompt(100, 13), greedy(16)
    (before,) = await service.open(ids, sampling, model="blue").end()
    await adapters.write("blue", 3)
    status, said = await load(service, "blue", adapters.paths["blue"])
    assert (status, "load_inplace" in said) == (400, True)
    assert (await load(service, "blue", adapters.paths["blue"], load_inplace=True))[0] == 200
    asked = service.open(ids, sampling, model="blue")
    (after,) = await asked.end()
    assert after == await adapters.expected("blue", ids, sampling)
    assert after.token_ids != before.token_ids
    assert asked.receipt.cached_tokens == 0


async def test_an_adapter_that_an_engine_cannot_load_is_not_served(
    service: Cluster, aggregated: EngineProcess, adapters: Adapters
) -> None:
    wide = make_adapter(adapters.directory / "wide", 4, rank=16)
    status, said = await load(service, "wide", wide)
    assert status == 400
    assert ": adapter wide cannot be loaded" in said
    assert "rank 16 is greater than max_lora_rank 8" in said
    assert [x.name for x in await service.client.list_models()] == [MODEL, "blue", "red"]
    # An engine that was started without LoRA says what to set.
    with pytest.raises(InvalidRequest, match=r"worker\.engine_args\.enable_lora"):
        await aggregated.load_adapter(read_adapter("red", str(adapters.paths["red"]), MODEL))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("model.layers.9", "model.layers.9.self_attn.q_proj"),  # of a deeper model, in part
        ("transformer.h.0", "transformer.h.0.self_attn.q_proj"),
    ],
)
async def test_an_adapter_of_another_model_is_refused_by_the_names_of_both(
    adapters: Adapters, tmp_path: Path, wrong: str, named: str
) -> None:
    path = make_adapter(tmp_path / "other", 6)
    file = path / "adapter_model.safetensors"
    weights = load_file(file)
    prefix = "base_model.model."
    first = "model.layers.0"
    save_file({x.replace(prefix + first, prefix + wrong): y for x, y in weights.items()}, file)
    adapter = read_adapter("other", str(path), MODEL)
    own = "which has .*model.layers.0.self_attn.qkv_proj"
    with pytest.raises(InvalidRequest, match=f"weights {named}.* fit no module of the.* {own}"):
        await adapters.engine.load_adapter(adapter)
    answer = await adapters.engine.run(prompt(40), params(4), adapter=adapter.key)
    assert answer.error is not None
    assert "is not loaded" in answer.error.message
