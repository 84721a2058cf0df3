"""What each kind of model is held to: the pair gives the tokens of one aggregated engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdserve.errors import TransferFailed
from pdserve.types import FinishReason
from tests.e2e.engines import EngineProcess, settings
from tests.e2e.kinds import CONTEXT, WINDOW
from tests.e2e.pair import CHUNK, Pair, params, prompt
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

# Around the edges of blocks, windows and prefill chunks.
LENGTHS = (3, 31, 32, 33, WINDOW - 1, WINDOW, WINDOW + 1, 95, 96, 97, 128, 129, CHUNK, 257, 1200)
MAX_TOKENS = 12
_MOVES = itertools.count(1)
# What a worker sent before it was stopped has arrived by then.
_ARRIVES_S = 0.1


@dataclass(slots=True)
class Subject:
    """A pair, and the engine whose answers are right. `answers` are those of it, by prompt."""

    pair: Pair
    reference: EngineProcess
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    async def right(self, ids: Sequence[int], max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
        answer = await self.reference.run(ids, params(max_tokens, ignore_eos=True))
        assert answer.finish_reason is FinishReason.LENGTH, answer.error
        self.answers[tuple(ids)] = answer.token_ids
        return answer.token_ids

    async def check(self, ids: Sequence[int], what: object) -> None:
        """Hand a prompt over."""
        found = await self.pair.run(ids, params(MAX_TOKENS, ignore_eos=True))
        report = self.pair.last[-1].report
        assert report is not None
        assert report.transfer is not None, f"{what}: not handed over"
        assert found.token_ids == await self.right(ids), what


@contextlib.asynccontextmanager
async def subject(
    model: Path, *, has_aggregated: bool = True, env: Mapping[str, str] | None = None, **more: Any
) -> AsyncIterator[Subject]:
    """Start the engines, those of the pair in `env`. Prompts are computed in chunks of CHUNK
    tokens."""
    arguments = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, **more}
    names = ["prefill", "decode", ""] if has_aggregated else ["prefill", "decode"]
    starts = [
        EngineProcess.start(
            settings(model, kv=KvSettings(name) if name else None, **arguments),
            env=env if name else None,
        )
        for name in names
    ]
    started = await asyncio.gather(*starts, return_exceptions=True)
    engines = [each for each in started if isinstance(each, EngineProcess)]
    try:
        for each in started:
            if isinstance(each, BaseException):
                raise each
        yield Subject(Pair(engines[0], engines[1], "prefill"), engines[2 if has_aggregated else 0])
    finally:
        for engine in engines:
            await engine.close()


async def check_lengths(of: Subject, lengths: Sequence[int] = LENGTHS) -> None:
    for length in lengths:
        await of.check(prompt(length), f"a prompt of {length}")
    await of.pair.until_empty()
    # A model that says the same whatever it is asked would show nothing.
    other = prompt(WINDOW - 1)
    other[0] = 450
    assert await of.right(other) != await of.right(prompt(WINDOW - 1))
    assert len(set(of.answers.values())) == len(of.answers)


async def check_prefix_hits(of: Subject, prefixes: Sequence[int] = (128, 600)) -> None:
    """Each side, and both, have computed the prefix before."""
    pair = of.pair
    for seed, (shared, engines) in enumerate(
        itertools.product(prefixes, ([pair.prefill], [pair.decode], [pair.prefill, pair.decode]))
    ):
        prefix = prompt(shared, 100 + seed)
        for engine in engines:
            await engine.run([*prefix, *prompt(9)], params(2, ignore_eos=True))
        for tail in (1, 40):
            await of.check([*prefix, *prompt(tail, 9)], f"{tail} tokens after {shared}")
    await pair.until_empty()


async def check_together(of: Subject) -> None:
    """Four at once. Compared if one engine gives the same for four at once as for one."""
    prompts = [prompt(40 + 83 * n, 7) for n in range(4)]
    right = [await of.right(ids) for ids in prompts]
    sampling = params(MAX_TOKENS, ignore_eos=True)
    streams = [of.reference.submit(ids, sampling) for ids in prompts]
    together = [(await of.reference.collect(stream)).token_ids for stream in streams]
    pairs = [of.pair.submit(ids, sampling) for ids in prompts]
    found = [each.token_ids for each in await asyncio.gather(*map(of.pair.collect, pairs))]
    assert found == right or together != right
    await of.pair.until_empty()


async def check_moves(of: Subject, lengths: Sequence[int] = (100, 255)) -> None:
    """A stream is exported where it decodes, and goes on at the other engine with its KV."""
    pair = of.pair
    for length in lengths:
        ids = prompt(length, 3)
        # So many that it does not end before it is moved.
        streams = pair.submit(ids, params(CONTEXT - 2 * CHUNK, ignore_eos=True))
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


async def check_resumed(of: Subject, length: int = 200) -> None:
    """A stream goes on without KV, after tokens that another engine has made. Some kernels round
    otherwise where they compute tokens together; then it is as if they were part of the prompt."""
    ids, sampling = prompt(length, 4), params(60, ignore_eos=True)
    right = await of.right(ids, 60)
    for count in (1, 33):
        found = await of.pair.decode.run(ids, sampling, resume=right[:count])
        if found.token_ids != right[count:]:
            as_prompt = await of.right([*ids, *right[:count]], 60 - count)
            assert found.token_ids == as_prompt, f"after {count} tokens"
    await of.pair.until_empty()


async def check_cancels(of: Subject) -> None:
    """Requests that are cancelled at any time leave nothing, and the next is right."""
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


async def check_pressure(of: Subject) -> None:
    """More at once than the KV cache holds: vLLM preempts requests, and computes them again."""
    sampling = params(100, ignore_eos=True)
    prompts = [prompt(150 + 31 * n, 40) for n in range(8)]
    right = [await of.right(ids, 100) for ids in prompts]
    streams = [of.pair.submit(ids, sampling) for ids in prompts]
    found = [each.token_ids for each in await asyncio.gather(*map(of.pair.collect, streams))]
    assert found == right
    await of.pair.until_empty()


async def check_killed_prefill(of: Subject) -> None:
    """A prefill worker that is killed while it hands over leaves nothing on the decode worker,
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


async def check_kills(of: Subject) -> None:
    """A worker that is killed takes no answer with it: the other one goes on from its tokens."""
    pair = of.pair
    ids, sampling = prompt(1200, 50), params(40, ignore_eos=True)
    right = await of.right(ids, 40)
    streams = pair.submit(ids, sampling)
    decoding = pair.decode.answer(streams[1])
    await pair.decode.until(lambda: len(decoding.token_ids) >= 5)
    so_far = [*(await pair.prefill.collect(streams[0])).token_ids, *decoding.token_ids]
    await pair.decode.kill()
    rest = await pair.prefill.run(ids, sampling, resume=so_far)
    assert (*so_far, *rest.token_ids) == right
    await pair.prefill.until_empty()
