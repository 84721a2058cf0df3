"""Checks for each kind of model: the pair must return the tokens of one aggregated engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kv_transfer.settings import ConnectorConfig
from pdserve.config import DataParallelConfig
from pdserve.deploy.local.groups import free_ports
from pdserve.errors import TransferFailed
from pdserve.types import FinishReason
from tests.support.engine_pair import CHUNK, EnginePair, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import CONTEXT, WINDOW
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from pdserve.types import MediaItem, SamplingParams

# Prompt lengths around the edges of blocks, windows and prefill chunks.
LENGTHS = (3, 31, 32, 33, WINDOW - 1, WINDOW, WINDOW + 1, 95, 96, 97, 128, 129, CHUNK, 257, 1200)
MAX_TOKENS = 12
_MOVES = itertools.count(1)
# bfloat16 has steps of 1/32 where the logits of these models are. Of 512 tokens about three are
# this close to the best one.
_ROUNDING = {"bfloat16": 4 / 32, "float32": 1e-4}
# Time for messages that a worker sent before it was stopped to arrive.
_ARRIVES_S = 0.1


@dataclass(slots=True)
class KindEngines:
    """A pair, and the reference engine. `answers` are the reference answers, by prompt. `rounding`
    is the largest difference of two logprobs that another order of sums makes."""

    pair: EnginePair
    reference: EngineProcess
    rounding: float
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    async def right(self, ids: Sequence[int], max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
        answer = await self.reference.run(ids, params(max_tokens, ignore_eos=True))
        assert answer.finish_reason is FinishReason.LENGTH, answer.error
        self.answers[tuple(ids)] = answer.token_ids
        return answer.token_ids

    async def worst_choice(
        self, ids: Sequence[int], answer: Sequence[int], media: Sequence[MediaItem] = ()
    ) -> float:
        """Return how far a token's logprob is below the best token's, at most, if the reference
        engine reads the answer."""
        sampling = params(1, ignore_eos=True, prompt_logprobs=1)
        read = await self.reference.run([*ids, *answer], sampling, media=media)
        places = [place for delta in read.deltas for place in delta.prompt_logprobs][-len(answer) :]
        assert [place.sampled.token_id for place in places] == list(answer)
        return max(place.top[0].logprob - place.sampled.logprob for place in places)

    async def check(self, ids: Sequence[int], what: object) -> None:
        """Run a prompt on the pair and compare the answer with the reference."""
        found = await self.pair.run(ids, params(MAX_TOKENS, ignore_eos=True))
        report = self.pair.last[-1].report
        assert report is not None
        assert report.transfer is not None, f"{what}: not handed over"
        assert found.token_ids == await self.right(ids), what


@contextlib.asynccontextmanager
async def kind_engines(
    model: Path,
    *,
    env: Mapping[str, str] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    prefill_env: Mapping[str, str] | None = None,
    shares_experts: bool = False,
    kv: ConnectorConfig | None = None,
    **more: Any,
) -> AsyncIterator[KindEngines]:
    """Start the engines; `env` applies to the pair, `prefill`, `decode` and `prefill_env` to one of
    it. Prompts are computed in chunks of CHUNK tokens. With `shares_experts`, decode is a rank of a
    data-parallel group of two, each of which has half of the experts."""
    arguments = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, **more}
    own = {"prefill": prefill or {}, "decode": decode or {}}
    envs = {"prefill": {**(env or {}), **(prefill_env or {})}, "decode": env}
    names, groups = ["prefill", "decode", ""], {}
    if shares_experts:
        names.append("other rank")
        own |= {key: {"enable_expert_parallel": True} for key in ("decode", "other rank")}
        port = free_ports("127.0.0.1")
        for rank, name in enumerate(("other rank", "decode")):
            groups[name] = DataParallelConfig(size=2, rank=rank, port=port, group="g")
    each_settings = {
        name: settings(
            model,
            kv=(kv or ConnectorConfig()) if name else None,
            instance_id=name,
            **arguments,
            **own.get(name, {}),
        )
        for name in names
    }
    starts = [
        EngineProcess.start(
            replace(each, data_parallel=groups.get(name, DataParallelConfig()), leave_s=WAIT_S),
            env=envs.get(name),
        )
        for name, each in each_settings.items()
    ]
    started = await asyncio.gather(*starts, return_exceptions=True)
    engines = [each for each in started if isinstance(each, EngineProcess)]
    try:
        for each in started:
            if isinstance(each, BaseException):
                raise each
        rounding = _ROUNDING[arguments.get("dtype", "float32")]
        yield KindEngines(EnginePair(engines[0], engines[1], "prefill"), engines[2], rounding)
    finally:
        # Together, because the ranks of a group end together.
        await asyncio.gather(*(engine.close() for engine in engines))


def endless(ids: Sequence[int]) -> SamplingParams:
    """Return sampling of an answer that does not end before it is moved or its worker killed."""
    return params(CONTEXT - len(ids), ignore_eos=True)


async def check_lengths(of: KindEngines, lengths: Sequence[int] = LENGTHS) -> None:
    for length in lengths:
        await of.check(prompt(length), f"a prompt of {length}")
    await of.pair.until_empty()
    # The checks prove nothing if the model gives the same answer to every prompt.
    other = prompt(WINDOW - 1)
    other[0] = 450
    assert await of.right(other) != await of.right(prompt(WINDOW - 1))
    assert len(set(of.answers.values())) == len(of.answers)


async def check_prefix_hits(of: KindEngines, tails: Sequence[int] = (1, 40)) -> None:
    """Check prompts whose prefix one side, the other, or both have computed before."""
    pair = of.pair
    for seed, (shared, engines) in enumerate(
        itertools.product((128, 600), ([pair.prefill], [pair.decode], [pair.prefill, pair.decode]))
    ):
        prefix = prompt(shared, 100 + seed)
        for engine in engines:
            await engine.run([*prefix, *prompt(9)], params(2, ignore_eos=True))
        for tail in tails:
            await of.check([*prefix, *prompt(tail, 9)], f"{tail} tokens after {shared}")
    await pair.until_empty()


async def check_together(of: KindEngines) -> None:
    """Check four requests at once. The batch decides how vLLM sums: an answer may differ from that
    of one request alone where two tokens are as good but for rounding."""
    prompts = [prompt(40 + 83 * n, 7) for n in range(4)]
    right = [await of.right(ids) for ids in prompts]
    sampling = params(MAX_TOKENS, ignore_eos=True)
    pairs = [of.pair.submit(ids, sampling) for ids in prompts]
    found = [each.token_ids for each in await asyncio.gather(*map(of.pair.collect, pairs))]
    await of.pair.until_empty()
    for ids, answer, expected in zip(prompts, found, right, strict=True):
        if answer != expected:
            worst = await of.worst_choice(ids, answer)
            assert worst <= of.rounding, f"{len(ids)} tokens: a token is {worst:.2f} below the best"


async def check_moves(of: KindEngines) -> None:
    """Check that a decoding stream can be exported and continues on the other engine with its
    KV."""
    pair = of.pair
    for length in (100, 255):
        ids = prompt(length, 3)
        streams = pair.submit(ids, endless(ids))
        decoding, name = pair.decode.answer(streams[1]), f"move-{next(_MOVES)}"
        await pair.decode.until(lambda a=decoding: len(a.token_ids) >= 20)  # type: ignore[misc]
        pair.decode.export(streams[1], name)
        exported = await pair.decode.collect(streams[1])
        first = await pair.prefill.collect(streams[0])
        so_far = [*first.token_ids, *exported.token_ids]
        phase = replace(pair.decode.decode_phase(name), live=True)
        total = len(so_far) + 40
        sampling = params(total, ignore_eos=True)
        rest = await pair.prefill.run(ids, sampling, phase, resume=so_far)
        assert rest.error is None, rest.error
        assert rest.report is not None
        assert rest.report.transfer is not None
        assert (*so_far, *rest.token_ids) == await of.right(ids, total), f"{length} tokens"
        await pair.until_empty()


async def check_resumed(of: KindEngines, length: int = 200) -> None:
    """Check that a stream continues without KV, after tokens of another engine. Some kernels round
    differently if they compute tokens together; then the tokens count as part of the prompt."""
    ids, sampling = prompt(length, 4), params(60, ignore_eos=True)
    right = await of.right(ids, 60)
    for count in (1, 33):
        found = await of.pair.decode.run(ids, sampling, resume=right[:count])
        if found.token_ids != right[count:]:
            as_prompt = await of.right([*ids, *right[:count]], 60 - count)
            assert found.token_ids == as_prompt, f"after {count} tokens"
    await of.pair.until_empty()


async def check_cancels(of: KindEngines) -> None:
    """Check that a request cancelled at any time leaves nothing, and that the next one is exact."""
    pair = of.pair
    for n in range(4):
        streams = pair.submit(prompt(300, 20 + n), params(60, ignore_eos=True))
        decoding = pair.decode.answer(streams[1])
        if n > 1:
            await pair.decode.until(lambda a=decoding, n=n: len(a.token_ids) >= n)  # type: ignore[misc]
        pair.prefill.cancel(streams[0])
        pair.decode.cancel(streams[1])
    await pair.until_empty()
    await of.check(prompt(300, 20), "after cancels")
    await pair.until_empty()


async def check_pressure(of: KindEngines) -> None:
    """Check more requests at once than fit in the KV cache: vLLM preempts some and recomputes
    them."""
    sampling = params(100, ignore_eos=True)
    prompts = [prompt(150 + 31 * n, 40) for n in range(8)]
    right = [await of.right(ids, 100) for ids in prompts]
    streams = [of.pair.submit(ids, sampling) for ids in prompts]
    found = [each.token_ids for each in await asyncio.gather(*map(of.pair.collect, streams))]
    assert found == right
    await of.pair.until_empty()


async def check_killed_prefill(of: KindEngines) -> None:
    """Check that a prefill worker killed during a transfer leaves nothing on the decode worker,
    which then computes the prompt itself."""
    prefill, decode = of.pair.prefill, of.pair.decode
    for seed in itertools.count(60):
        ids = prompt(1200, seed)
        _, receiving = of.pair.submit(ids, params(MAX_TOKENS, ignore_eos=True))
        while not (await decode.status())[1].transfers and not decode.answer(receiving).deltas:
            pass
        os.kill(prefill.pid, signal.SIGSTOP)
        await asyncio.sleep(_ARRIVES_S)
        if (await decode.status())[1].transfers:
            break
        os.kill(prefill.pid, signal.SIGCONT)  # it was over
        await decode.collect(receiving)
    right = await of.right(ids)
    await prefill.kill()
    broken = await decode.collect(receiving)
    assert broken.error is not None
    assert broken.error.code == TransferFailed.code
    await decode.until_empty()
    assert (await decode.run(ids, params(MAX_TOKENS, ignore_eos=True))).token_ids == right
    await decode.until_empty()


async def check_kills(of: KindEngines) -> None:
    """Check that no answer is lost with a killed worker: the other one continues after its
    tokens."""
    pair, ids = of.pair, prompt(1200, 50)
    streams = pair.submit(ids, endless(ids))
    decoding = pair.decode.answer(streams[1])
    await pair.decode.until(lambda: len(decoding.token_ids) >= 5)
    await pair.decode.kill()
    await check_continues(of, ids, streams)


async def check_continues(of: KindEngines, ids: Sequence[int], streams: tuple[int, int]) -> None:
    """Check that the prefill engine continues an answer whose decode engine has failed."""
    pair = of.pair
    so_far = [
        *(await pair.prefill.collect(streams[0])).token_ids,
        *pair.decode.answer(streams[1]).token_ids,
    ]
    total = len(so_far) + 30
    rest = await pair.prefill.run(ids, params(total, ignore_eos=True), resume=so_far)
    assert (*so_far, *rest.token_ids) == await of.right(ids, total)
    await pair.prefill.until_empty()
