"""LoRA adapters over a router and fake engines: where they are loaded, and where requests go."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from pdserve.errors import ModelNotFound
from pdserve.types import SamplingParams
from router.admission.queue import MAX_BLOCKED, MAX_PASSES
from tests.support.cluster import Cluster
from tests.support.timeouts import WAIT_S, wait_until
from workers.control.loaded_adapters import read_adapter

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "pdserve-demo"
PROMPT = list(range(20, 60))
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


def write(directory: Path, weights: bytes = b"1") -> str:
    """Write the files of an adapter and return its key."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return read_adapter(directory.name, str(directory), MODEL).key


async def post(cluster: Cluster, what: str, name: str, **body: object) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    url = f"http://{cluster.http}/v1/{what}_lora_adapter"
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json={"lora_name": name, **body}) as reply,
    ):
        return reply.status, await reply.text()


async def load(cluster: Cluster, directory: Path, **more: object) -> tuple[int, str]:
    return await post(cluster, "load", directory.name, lora_path=str(directory), **more)


def cluster_of(directory: Path, max_loras: int = 1) -> Cluster:
    return Cluster(
        prefill=1,
        decode=1,
        engine_args={"max_loras": max_loras, "step_s": 0.001},
        worker={"adapter_directories": (str(directory),)},
    )


async def served(cluster: Cluster) -> dict[str, str]:
    return {x.name: x.parent for x in await cluster.client.list_models()}


async def test_an_adapter_is_a_model_from_its_load_to_its_unload(tmp_path: Path) -> None:
    red = tmp_path / "red"
    key = write(red)
    async with cluster_of(tmp_path) as cluster:
        assert (await load(cluster, red))[0] == 200
        assert await served(cluster) == {MODEL: "", "red": MODEL}
        for name, adapter in (("red", key), (MODEL, "")):
            answer = await cluster.ask(PROMPT, SHORT, model=name)
            assert answer.token_ids == cluster.expected(PROMPT, SHORT, adapter).token_ids
            assert answer.receipt is not None
            assert answer.receipt.decode_worker == "decode-0"
        assert (await post(cluster, "unload", "red"))[0] == 200
        with pytest.raises(ModelNotFound, match="'red' is not served; served: pdserve-demo"):
            await cluster.ask(PROMPT, SHORT, model="red")
        status, said = await post(cluster, "unload", "red")
        assert (status, "loaded: none" in said) == (404, True)


async def test_an_adapter_that_one_worker_cannot_load_is_loaded_by_none(tmp_path: Path) -> None:
    write(tmp_path)
    async with cluster_of(tmp_path) as cluster:
        await cluster.add("decode-1", engine_args={"max_loras": 0})
        await cluster.until_ready()
        status, said = await load(cluster, tmp_path)
        assert (status, "worker decode-1" in said, "enable_lora" in said) == (400, True, True)
        assert list(await served(cluster)) == [MODEL]
        assert not any(worker.service.adapters.usable for worker in cluster.workers.values())


async def test_a_later_worker_and_a_new_router_get_the_served_adapters(
    tmp_path: Path,
) -> None:
    key = write(tmp_path)
    async with cluster_of(tmp_path) as cluster:
        assert (await load(cluster, tmp_path))[0] == 200
        await cluster.add("decode-1")
        late = cluster.workers["decode-1"]
        await wait_until(lambda: key in late.service.adapters.usable)
        await cluster.router.stop()
        await cluster.start_router()
        await cluster.until_ready()
        assert tmp_path.name in await served(cluster)


async def test_a_request_waits_in_the_router_for_the_slot_of_its_adapter(tmp_path: Path) -> None:
    names = [f"x{i}" for i in range(MAX_BLOCKED + 2)]
    async with cluster_of(tmp_path, max_loras=1) as cluster:
        for name in names:
            write(tmp_path / name)
            assert (await load(cluster, tmp_path / name))[0] == 200
        first = asyncio.create_task(cluster.ask(PROMPT, ENDLESS, model=names[0]))
        await wait_until(lambda: cluster.busy("decode-0"))
        others = [cluster.ask(PROMPT, SHORT, model=name) for name in names[1:]]
        waiting = asyncio.gather(*others)
        await wait_until(lambda: cluster.router.requests.admission.queued == len(others))
        # No blocks are held for them, and they hold up neither the model nor the other adapter,
        # until that has passed them often enough.
        for _ in range(MAX_PASSES + 1):
            await cluster.ask(PROMPT, SHORT)
        for _ in range(MAX_PASSES):
            await cluster.ask(PROMPT, SHORT, model=names[0])
        entries = await cluster.entries()
        assert [entries[x].outstanding_requests for x in cluster.workers] == [0, 1]
        last = asyncio.create_task(cluster.ask(PROMPT, SHORT, model=names[0]))
        await wait_until(lambda: cluster.router.requests.admission.queued == len(others) + 1)
        first.cancel()
        assert len(await asyncio.wait_for(waiting, WAIT_S)) == len(others)
        await asyncio.wait_for(last, WAIT_S)


async def test_a_replaced_adapter_is_unloaded_when_its_requests_have_ended(tmp_path: Path) -> None:
    before = write(tmp_path, b"1")
    async with cluster_of(tmp_path, max_loras=2) as cluster:
        assert (await load(cluster, tmp_path))[0] == 200
        old = asyncio.create_task(cluster.ask(PROMPT, ENDLESS, model=tmp_path.name))
        await wait_until(lambda: cluster.busy("decode-0"))
        after = write(tmp_path, b"2")
        replacing = asyncio.create_task(load(cluster, tmp_path, load_inplace=True))
        adapters = cluster.workers["decode-0"].service.adapters
        await wait_until(
            lambda: cluster.router.requests.models.adapters()[tmp_path.name].key == after
        )
        answer = await cluster.ask(PROMPT, SHORT, model=tmp_path.name)
        assert answer.token_ids == cluster.expected(PROMPT, SHORT, after).token_ids
        assert set(adapters.usable) == {before, after}
        old.cancel()
        assert (await asyncio.wait_for(replacing, WAIT_S))[0] == 200
        assert set(adapters.usable) == {after}
