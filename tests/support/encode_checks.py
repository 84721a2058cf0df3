"""Checks of an encode engine: with its embeddings, prefill and decode must return the tokens of one
aggregated engine, whatever happens to it. `python -m tests.support.encode_checks KIND` runs them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kv_transfer.image_features import ImageFeatureSource
from kv_transfer.settings import ConnectorConfig
from pdserve.types import FinishReason
from tests.support.engine_pair import CHUNK, joined, params
from tests.support.engines import EngineProcess, settings
from tests.support.image_checks import TOKENS, WORDS, rendered
from tests.support.model_kind_checks import kind_engines
from tests.support.model_kinds import KINDS, make_kind
from workers.engine import EncodePhase, PrefillPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.image_checks import ImagePrompt
    from tests.support.model_kind_checks import KindEngines
    from tests.support.model_kinds import Kind

_NUMBERS = itertools.count(1)
# Short, so that a check of a stopped encode engine need not wait long. An embedding that is late by
# chance is computed by prefill.
_ENCODE_TIMEOUT_S = 3.0


@dataclass(slots=True)
class EncodeEngines:
    """An encode engine before a pair, and the reference. `fetched` counts the images of the answers
    so far whose embeddings came from it."""

    encode: EngineProcess
    of: KindEngines
    mark: str
    source: ImageFeatureSource
    fetched: int = 0

    @staticmethod
    @asynccontextmanager
    async def start(model: Path, kind: Kind) -> AsyncIterator[EncodeEngines]:
        kv = ConnectorConfig(encode_timeout_s=_ENCODE_TIMEOUT_S)
        chosen = settings(model, kv=kv, instance_id="encode", max_num_batched_tokens=CHUNK)
        encode = await EngineProcess.start(replace(chosen, encodes=True))
        try:
            assert encode.info.kv is not None
            row_bytes = encode.info.kv.embedding_bytes
            source = ImageFeatureSource("", encode.addresses[0], "encode", row_bytes)
            async with kind_engines(model, kv=kv, **kind.engine_args) as of:
                yield EncodeEngines(encode, of, kind.image_mark, source)
        finally:
            await encode.close()

    def submit(self, prompt: ImagePrompt) -> tuple[int, int, int]:
        """Submit to all three engines at once, as the router does."""
        number, sampling = next(_NUMBERS), params(TOKENS, ignore_eos=True)
        pair, source = self.of.pair, replace(self.source, transfer_id=f"encode-{number}")
        phase = PrefillPhase(f"encoded-{number}", embeddings=source)
        return (
            self.encode.submit(
                prompt.ids, params(1), EncodePhase(source.transfer_id), media=prompt.media
            ),
            pair.prefill.submit(prompt.ids, sampling, phase, media=prompt.media),
            pair.decode.submit(
                prompt.ids,
                sampling,
                pair.prefill.decode_phase(phase.transfer_id),
                media=prompt.without_data,
            ),
        )

    async def answer(self, streams: tuple[int, int, int]) -> tuple[int, ...]:
        first = await self.of.pair.prefill.collect(streams[1])
        rest = await self.of.pair.decode.collect(streams[2])
        assert rest.error is None, rest.error
        assert first.report is not None
        self.fetched += first.report.fetched_images
        return joined(first, rest).token_ids

    async def right(self, prompt: ImagePrompt) -> tuple[int, ...]:
        sampling = params(TOKENS, ignore_eos=True)
        answer = await self.of.reference.run(prompt.ids, sampling, media=prompt.media)
        assert answer.finish_reason is FinishReason.LENGTH, answer.error
        return answer.token_ids

    async def check(self, text: str, seeds: Sequence[int], fetched: int) -> None:
        """Check a prompt, of whose images prefill fetches this many."""
        prompt = await rendered(self.of.reference, text, seeds)
        before, streams = self.fetched, self.submit(prompt)
        assert await self.answer(streams) == await self.right(prompt), text
        encoded = await self.encode.collect(streams[0])
        assert (encoded.finish_reason, encoded.token_ids) == (FinishReason.STOP, ())
        assert self.fetched - before == fetched, text

    async def check_many(self, seeds: Sequence[int], number: int | None = None) -> None:
        """Check requests at once, each with an image of its own. Send signal `number` to the encode
        engine while they are open. A token may differ where the reference finds both as good but
        for rounding."""
        text = f"{WORDS}{self.mark} the"
        prompts = [await rendered(self.of.reference, text, [seed]) for seed in seeds]
        right = [await self.right(prompt) for prompt in prompts]
        streams = [self.submit(prompt) for prompt in prompts]
        if number is not None:
            os.kill(self.encode.pid, number)
        answers = await asyncio.gather(*(self.answer(x) for x in streams))
        assert len(set(right)) > 1
        for prompt, answer, expected in zip(prompts, answers, right, strict=True):
            if answer != expected:
                worst = await self.of.worst_choice(prompt.ids, answer, prompt.media)
                assert worst <= self.of.rounding, f"a token is {worst:.2f} below the best"


async def check_encode(on: EncodeEngines) -> None:
    mark, pair = on.mark, on.of.pair
    await on.check(f"{mark} the", [1], 1)
    await on.check(f"{WORDS}{mark} and {mark} the", [2, 3], 2)
    await on.check(f"{mark} and {mark} the", [3, 2], 2)  # swapped
    await on.check(f"{mark} or {mark} the", [4, 4], 1)  # one image twice
    await on.check(f"{WORDS * 12}{mark}{WORDS}", [5], 1)  # over prefill chunks
    await on.check(f"{WORDS * 12}{mark}{WORDS} the", [5], 0)  # the prefix is cached
    before = on.fetched
    await on.check_many(range(10, 22))
    assert on.fetched - before > 0
    await _check_refused_and_cancelled(on)
    await on.check_many(range(30, 36), signal.SIGSTOP)
    os.kill(on.encode.pid, signal.SIGCONT)
    await on.check(f"{mark} the", [37], 1)
    await on.check_many(range(40, 52), signal.SIGKILL)
    await on.check_many([53, 54])  # at the address of a dead engine
    await pair.until_empty()


async def _check_refused_and_cancelled(on: EncodeEngines) -> None:
    """A request that the encode engine refuses is answered without it, and one that is cancelled
    leaves nothing."""
    reference, pair = on.of.reference, on.of.pair
    prompt = await rendered(reference, f"{on.mark} the", [25])
    streams = on.submit(prompt)
    pair.prefill.cancel(streams[1])
    pair.decode.cancel(streams[2])
    await on.encode.collect(streams[0])
    streams = on.submit(await rendered(reference, f"{on.mark} the", [26]))
    on.encode.cancel(streams[0])
    again = await rendered(reference, f"{on.mark} the", [26])
    assert await on.answer(streams) == await on.right(again)
    await pair.until_empty()


async def _main(name: str) -> None:
    with TemporaryDirectory() as folder:
        model = await make_kind(Path(folder) / "model", name)
        async with EncodeEngines.start(model, KINDS[name]) as on:
            await check_encode(on)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
