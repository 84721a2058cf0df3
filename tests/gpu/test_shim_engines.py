"""vLLM's build for CUDA as two engines on the CUDA shim, which exchange KV over `cuda_ipc`.

No kernel runs: a model without kernels fills the KV cache with what the tokens before give, and
samples a wrong token as soon as one byte of a sequence differs
(tests/support/engine_patches/skipped_kernels.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

for _module in ("torch", "msgspec", "grpc", "pytest_asyncio"):
    pytest.importorskip(_module)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import pytest_asyncio  # noqa: E402

from kv_transfer.settings import ConnectorConfig  # noqa: E402
from pdserve.demo import MODEL_DIR  # noqa: E402
from pdserve.types import FinishReason  # noqa: E402
from tests.support.engine_pair import EnginePair, params, prompt  # noqa: E402
from tests.support.engines import EngineProcess, settings  # noqa: E402
from tests.support.gpu_caches import is_shim  # noqa: E402
from tests.support.model_kinds import KINDS, make_kind  # noqa: E402
from tests.support.shim_engines import answer  # noqa: E402
from tests.support.tiny_models import ModelSpec, make_model, with_mtp_layer  # noqa: E402
from workers.engine import PrefillPhase  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.engines import EngineAnswer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
BLOCK, CHUNK = 16, 256
# A cache that is enough for two of the longest sequences, and too small for ten usual ones.
SMALL = {"block_size": BLOCK, "num_gpu_blocks_override": 130}
RANKS = {
    **SMALL,
    "tensor_parallel_size": 2,
    "worker_cls": "tests.support.engine_patches.skipped_kernels.Rank",
    "disable_custom_all_reduce": True,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
AT_ONCE = 10
SEEDS = itertools.count(1)


def lack() -> str:
    """Why the engines cannot run here, or ""."""
    if not is_shim():
        return "needs the CUDA shim: `make gpu-shim`"
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "the CUDA shim has no vLLM: `make gpu-shim`"
    return ""


@dataclass(frozen=True, slots=True)
class Engines:
    """A way to start engines. `orders`: what damages the KV that they announce
    (tests/support/engine_patches/corrupt_kv.py)."""

    model: Path
    orders: Path
    preemptions: Path

    async def start(self, name: str, model: Path | None = None, **args: Any) -> EngineProcess:
        """Start an engine with the Llama and a small cache, or with another model."""
        kv = ConnectorConfig(transports=("cuda_ipc",), hold_s=30.0)
        made = settings(
            model or self.model,
            kv=kv,
            instance_id=name,
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=1024,
            max_num_batched_tokens=CHUNK,
            enforce_eager=True,
            gpu_memory_utilization=0.3,
            **(args if model else SMALL),
        )
        env = {
            "CUDA_SHIM_KERNELS": "skip",
            "CUDA_SHIM_DELAY_US": "500",
            "PDSERVE_TEST_CORRUPT_KV": str(self.orders),
            "PDSERVE_TEST_SKIPPED_KERNELS": str(self.preemptions),
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_DISABLE_PYNCCL": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        return await EngineProcess.start(made, env=env)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    if reason := lack():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("engines")
    for name in ("orders", "preemptions"):
        (folder / name).write_text("", encoding="ascii")
    model = make_model(folder / "model", ModelSpec(dtype="bfloat16"))
    return Engines(model, folder / "orders", folder / "preemptions")


@asynccontextmanager
async def started(
    engines: Engines, model: Path | None = None, **args: Any
) -> AsyncIterator[EnginePair]:
    prefill = await engines.start("first", model, **args)
    try:
        decode = await engines.start("second", model, **args)
        yield EnginePair(prefill, decode, "first")
        await decode.close()
    finally:
        await prefill.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(engines: Engines) -> AsyncIterator[EnginePair]:
    async with started(engines) as made:
        yield made


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, CHUNK + 1, 700])
async def test_every_byte_of_a_prompt_arrives(pair: EnginePair, length: int) -> None:
    ids = prompt(length, next(SEEDS))
    found = await pair.run(ids, params(20, ignore_eos=True))
    assert found.token_ids == answer(ids, 20)
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.transport == "cuda_ipc"
    assert report.transfer.blocks == -(-length // BLOCK)
    await pair.until_empty()


async def test_a_wrong_block_is_seen(pair: EnginePair, engines: Engines) -> None:
    ids = prompt(200, next(SEEDS))
    engines.orders.write_text("swap", encoding="ascii")
    first, *others = (await pair.run(ids, params(4, ignore_eos=True))).token_ids
    engines.orders.write_text("", encoding="ascii")
    assert (first, *others) == (*answer(ids, 1), 0, 0, 0)
    await pair.until_empty()


class Load:
    """Requests at random, some of which are cancelled at a random moment."""

    def __init__(self, pair: EnginePair, requests: int) -> None:
        self._pair, self._requests = pair, requests
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Run all, and wait until nothing is left of them."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._requests):
                group.create_task(self._request(random.Random(number)))
        await self._pair.until_empty()

    async def _request(self, dice: random.Random) -> None:
        async with self._slots:
            ids, count = prompt(dice.randrange(1, 600), next(SEEDS)), dice.randrange(40, 160)
            streams = self._pair.submit(ids, params(count, ignore_eos=True))
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() / 3)
                self._pair.prefill.cancel(streams[0])
                self._pair.decode.cancel(streams[1])
            else:
                assert (await self._pair.collect(streams)).token_ids == answer(ids, count)


async def test_nothing_is_left_of_cancels(pair: EnginePair) -> None:
    await Load(pair, 60).run()


async def test_preempted_requests_are_exact(pair: EnginePair, engines: Engines) -> None:
    """Their prompts all have room in the decode engine's cache, and only half of the answers."""
    before = engines.preemptions.read_text("ascii")
    prompts, count = [prompt(100, next(SEEDS)) for _ in range(8)], 400
    streams = [pair.submit(ids, params(count, ignore_eos=True)) for ids in prompts]
    for ids, each in zip(prompts, streams, strict=True):
        assert (await pair.collect(each)).token_ids == answer(ids, count)
    assert engines.preemptions.read_text("ascii") != before
    await pair.until_empty()


async def test_a_drained_engine_gives_its_streams_away(pair: EnginePair) -> None:
    """Streams move while they are decoded, and each answer goes on where it was."""
    old, new, count = pair.decode, pair.prefill, 600
    sampling = params(count, ignore_eos=True)
    prompts = [prompt(40 + 5 * n, next(SEEDS)) for n in range(3)]
    streams = [old.submit(ids, sampling) for ids in prompts]
    await old.until(lambda: all(len(old.answer(x).token_ids) >= 6 for x in streams))
    for stream in streams:
        old.export(stream, f"moved-{stream}")

    async def moved(ids: list[int], stream: int) -> None:
        head = await old.collect(stream)
        assert head.finish_reason is FinishReason.ABORT
        assert head.deltas[-1].exported_tokens == len(head.token_ids)
        phase = replace(old.decode_phase(f"moved-{stream}"), live=True)
        tail = await new.run(ids, sampling, phase, resume=head.token_ids)
        assert head.token_ids + tail.token_ids == answer(ids, count)
        assert tail.report is not None
        assert tail.report.transfer is not None
        assert tail.report.transfer.blocks == -(-(len(ids) + len(head.token_ids) - 1) // BLOCK)

    await asyncio.gather(*map(moved, prompts, streams))
    await pair.until_empty()


async def test_a_killed_engine_leaves_nothing_at_its_peers(
    pair: EnginePair, engines: Engines
) -> None:
    """The victim sends to one engine and receives from the other when it is killed."""
    victim = await engines.start("victim")
    to, back = EnginePair(pair.prefill, victim, "first"), EnginePair(victim, pair.decode, "victim")
    sampling = params(100, ignore_eos=True)
    prompts = [prompt(400, next(SEEDS)) for _ in range(8)]
    received = [to.submit(ids, sampling) for ids in prompts[::2]]
    sent = [back.submit(ids, sampling) for ids in prompts[1::2]]
    held = pair.prefill.submit(prompt(300, next(SEEDS)), sampling, PrefillPhase("nobody asks"))
    await pair.prefill.collect(held)
    await victim.until(lambda: any(victim.answer(x).token_ids for x, _ in sent))
    await victim.kill()
    for (_, stream), ids in zip(sent, prompts[1::2], strict=True):
        told_or_lost(await pair.decode.collect(stream), ids)
    pair.prefill.cancel(held)
    for stream, _ in received:
        pair.prefill.cancel(stream)
    await pair.until_empty()
    ids = prompt(300, next(SEEDS))
    assert (await pair.run(ids, sampling)).token_ids == answer(ids, 100)
    await pair.until_empty()


async def test_two_ranks_exchange_with_one(pair: EnginePair, engines: Engines) -> None:
    """Each rank has one of the two heads."""
    ranks = await engines.start("ranks", engines.model, **RANKS)
    try:
        to = EnginePair(ranks, pair.decode, "ranks")
        back = EnginePair(pair.prefill, ranks, "first")
        for each, length in itertools.product((to, back), (1, BLOCK + 1, CHUNK + 1, 700)):
            ids = prompt(length, next(SEEDS))
            assert (await each.run(ids, params(20, ignore_eos=True))).token_ids == answer(ids, 20)
        await to.until_empty()
        await back.until_empty()
    finally:
        await ranks.close()


@pytest.mark.parametrize("name", ["Gemma-2", "Granite-hybrid", "MTP"])
async def test_other_kinds_of_caches_arrive_exactly(
    engines: Engines, tmp_path: Path, name: str
) -> None:
    """Windows, states, and a model that drafts: its drafts are accepted and rejected in turn, and
    it writes KV after the step that frees a request's blocks."""
    if name == "MTP":
        model, args = with_mtp_layer(MODEL_DIR, tmp_path / "model"), MTP
    else:
        model, args = await make_kind(tmp_path, name), dict(KINDS[name].engine_args)
    async with started(engines, model, **args) as pair:
        for length in (1, BLOCK + 1, CHUNK + 1, 700):
            ids = prompt(length, next(SEEDS))
            assert (await pair.run(ids, params(20, ignore_eos=True))).token_ids == answer(ids, 20)
            sizes = {len(delta.token_ids) for delta in pair.last[1].deltas if delta.token_ids}
            assert sizes == ({1, 2} if name == "MTP" else {1})
        await Load(pair, 20).run()


def told_or_lost(rest: EngineAnswer, ids: list[int]) -> None:
    """Assert that the answer is exact, or that it has no token because its KV did not come."""
    if rest.error is None:
        assert rest.token_ids == answer(ids, 100)[1:]
    else:
        assert (rest.error.code, rest.token_ids) == ("transfer_failed", ())
