"""Checks of images through prefill and decode: the pair must return the tokens of one aggregated
engine. Decode engines get no image data, except where they compute a prompt."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from pdserve import wire
from pdserve.errors import TransferFailed
from pdserve.types import MAX_MEDIA_METADATA, FinishReason
from pdserve.v1 import worker_pb2 as w
from tests.support.engine_pair import params
from tests.support.model_kinds import CONTEXT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import MediaItem
    from tests.support.engines import EngineProcess
    from tests.support.model_kind_checks import KindEngines
    from tests.support.model_kinds import Kind

TOKENS = 24
WORDS = "what is in the picture of the worker that reads the prompt and the one that writes it "
END = " the"  # short: some models remember little of what was long ago
_MOVES = itertools.count(1)


class ImagePrompt(NamedTuple):
    """A rendered prompt."""

    ids: tuple[int, ...]
    media: tuple[MediaItem, ...]

    @property
    def without_data(self) -> tuple[MediaItem, ...]:
        return tuple(item.without_data() for item in self.media)


def picture(seed: int, width: int = 140, height: int = 112) -> bytes:
    """Return a PNG file of random colours in large squares."""
    noise = Image.effect_noise((4, 4), 0).convert("RGB")
    for at in range(16):
        number = (seed * 16 + at + 1) * 2654435761 % (1 << 32)
        colour = (number >> 8 & 255, number >> 16 & 255, number >> 24)
        noise.putpixel((at % 4, at // 4), colour)
    buffer = BytesIO()
    noise.resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


async def rendered(
    engine: EngineProcess, text: str, seeds: Sequence[int], size: tuple[int, int] = (140, 112)
) -> ImagePrompt:
    """Render a text with images; the bytes that decode gets for one are bounded."""
    images = [w.EncodedImage(data=picture(seed, *size)) for seed in seeds]
    response = await engine.render(w.RenderRequest(text=text, images=images))
    media = wire.media_from_pb(response.media, len(response.prompt_token_ids))
    for item in media:
        assert wire.media_to_pb(item.without_data()).ByteSize() <= MAX_MEDIA_METADATA
    return ImagePrompt(tuple(response.prompt_token_ids), media)


async def check_images(of: KindEngines, kind: Kind) -> None:
    mark = kind.image_mark
    await _check_places(of, mark)
    await _check_prefix_hits(of, mark)
    await _check_many(of, mark)
    if "resumed" not in kind.skips:
        await _check_resumed(of, mark)
    await _check_moved(of, mark)
    await _check_failures(of, mark)


async def _right(of: KindEngines, prompt: ImagePrompt, tokens: int = TOKENS) -> tuple[int, ...]:
    answer = await of.reference.run(prompt.ids, params(tokens, ignore_eos=True), media=prompt.media)
    assert answer.finish_reason is FinishReason.LENGTH, answer.error
    return answer.token_ids


async def _check(of: KindEngines, prompt: ImagePrompt, what: str) -> tuple[int, ...]:
    """Run a prompt on the pair, compare the answer with the reference, and return it. Also compare
    the hit that a router expects with the engine's, if the model's blocks are reported."""
    prefill = of.pair.prefill
    hit = await prefill.expected_hit(prompt.ids, prompt.media)
    is_reported = bool(await prefill.cached_blocks())
    found = await of.pair.run(prompt.ids, params(TOKENS, ignore_eos=True), media=prompt.media)
    first, report = (x.report for x in of.pair.last)
    assert first is not None
    assert report is not None
    assert hit == first.cached_tokens or not is_reported, f"{what}: {first.cached_tokens} cached"
    assert report.transfer is not None, f"{what}: not handed over"
    right = await _right(of, prompt)
    assert found.token_ids == right, what
    return right


async def _check_places(of: KindEngines, mark: str) -> None:
    """Check images at any place of a prompt, of one text. Another image is another answer."""
    engine = of.reference
    answers = {
        seed: await _check(of, await rendered(engine, mark + END, [seed]), f"image {seed}")
        for seed in range(4)
    }
    assert len(set(answers.values())) > 1
    both = f"{WORDS}{mark} and {mark}{END}"
    two = await _check(of, await rendered(engine, both, [1, 2]), "two images")
    swapped = await _check(of, await rendered(engine, both, [2, 1]), "two images, swapped")
    assert two != swapped
    await _check(of, await rendered(engine, WORDS + mark, [5]), "at the end")
    # At the borders of prefill chunks: large, or close to one.
    await _check(of, await rendered(engine, WORDS + mark + WORDS, [6], (560, 560)), "large image")
    for blanks in range(8):
        text = WORDS * 12 + "a " * 4 * blanks + mark + WORDS
        await _check(of, await rendered(engine, text, [7]), f"near a chunk's border, {blanks}")
    await of.pair.until_empty()


async def _check_prefix_hits(of: KindEngines, mark: str) -> None:
    """Check prompts whose images one side, the other, or both have computed before. Another image
    under the same text is no hit."""
    pair, engine = of.pair, of.reference
    sides = ([pair.prefill], [pair.decode], [pair.prefill, pair.decode])
    for seed, engines in enumerate(sides, 10):
        text = WORDS * 3 + mark + WORDS
        prompt = await rendered(engine, text, [seed])
        for each in engines:
            await each.run(prompt.ids, params(2, ignore_eos=True), media=prompt.media)
        await _check(of, prompt, f"cached by {len(engines)}")
        await _check(of, await rendered(engine, text + WORDS, [seed]), "a longer prompt")
        await _check(of, await rendered(engine, text, [seed + 10]), "another image")
    await pair.until_empty()


async def _check_many(of: KindEngines, mark: str) -> None:
    """Check many requests at once with one text, each with an image of its own. The batch decides
    how vLLM sums: see `check_together`."""
    prompts = [await rendered(of.reference, mark + END, [seed]) for seed in range(30, 42)]
    right = [await _right(of, prompt) for prompt in prompts]
    sampling = params(TOKENS, ignore_eos=True)
    streams = [of.pair.submit(x.ids, sampling, media=x.media) for x in prompts]
    answers = await asyncio.gather(*map(of.pair.collect, streams))
    assert len(set(right)) > 1
    for prompt, answer, expected in zip(prompts, answers, right, strict=True):
        if answer.token_ids != expected:
            worst = await of.worst_choice(prompt.ids, answer.token_ids, prompt.media)
            assert worst <= of.rounding, f"a token is {worst:.2f} below the best"
    await of.pair.until_empty()


async def _check_resumed(of: KindEngines, mark: str) -> None:
    """Check a stream that continues after tokens of another engine: with KV, and computed again
    from the image's data."""
    prompt = await rendered(of.reference, WORDS + mark + WORDS, [50])
    right, sampling = await _right(of, prompt), params(TOKENS, ignore_eos=True)
    found = await of.pair.run(prompt.ids, sampling, resume=right[:5], media=prompt.media)
    assert found.token_ids == right[5:]
    again = await rendered(of.reference, WORDS + mark + WORDS, [51])
    right = await _right(of, again)
    answer = await of.pair.decode.run(again.ids, sampling, resume=right[:5], media=again.media)
    assert answer.token_ids == right[5:]
    await of.pair.until_empty()


async def _check_moved(of: KindEngines, mark: str) -> None:
    """Check a decoding stream that goes to another engine with its KV, and without image data."""
    pair = of.pair
    prompt = await rendered(of.reference, WORDS + mark + WORDS, [52], (280, 280))
    streams = pair.submit(prompt.ids, params(CONTEXT // 2, ignore_eos=True), media=prompt.media)
    decoding, name = pair.decode.answer(streams[1]), f"image-move-{next(_MOVES)}"
    await pair.decode.until(lambda: len(decoding.token_ids) >= 20)
    pair.decode.export(streams[1], name)
    exported = await pair.decode.collect(streams[1])
    first = await pair.prefill.collect(streams[0])
    so_far = [*first.token_ids, *exported.token_ids]
    phase = replace(pair.decode.decode_phase(name), live=True)
    total = len(so_far) + 20
    rest = await pair.prefill.run(
        prompt.ids,
        params(total, ignore_eos=True),
        phase,
        resume=so_far,
        media=prompt.without_data,
    )
    assert rest.error is None, rest.error
    assert (*so_far, *rest.token_ids) == await _right(of, prompt, total)
    await pair.until_empty()


async def _check_failures(of: KindEngines, mark: str) -> None:
    """Check that a decode engine without the image's data fails where it would compute the prompt,
    and that it computes it with the data."""
    decode, sampling = of.pair.decode, params(TOKENS, ignore_eos=True)
    prompt = await rendered(of.reference, WORDS + mark + WORDS, [53])
    failed = await decode.run(prompt.ids, sampling, media=prompt.without_data)
    assert failed.error is not None
    assert failed.error.code == TransferFailed.code
    for seed in itertools.count(54):
        prompt = await rendered(of.reference, WORDS * 3 + mark + WORDS, [seed])
        prefill_stream, decode_stream = of.pair.submit(prompt.ids, sampling, media=prompt.media)
        of.pair.prefill.cancel(prefill_stream)
        lost = await decode.collect(decode_stream)
        if lost.error is not None:
            break
        # The prompt was computed before the cancel arrived.
        assert lost.finish_reason is FinishReason.LENGTH
    assert lost.error.code == TransferFailed.code
    again = await decode.run(prompt.ids, sampling, media=prompt.media)
    assert again.token_ids == await _right(of, prompt)
    await of.pair.until_empty()
