"""Checks of a model whose weights change while it is served. They pause and update the model, so
they run only with the checkpoint that `--weights` names; it may be the one that is served."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

from pdserve.cli.verify.endpoint import ANSWER_TOKENS, EndpointAnswer, together
from pdserve.cli.verify.outcome import (
    CACHE_TRIES,
    FILLER,
    Check,
    CheckFailed,
    NotApplicable,
    Passed,
    cached_tokens,
    fresh,
)

if TYPE_CHECKING:
    from pdserve.cli.verify.endpoint import Endpoint
    from pdserve.cli.verify.outcome import Outcome

UPDATED_ANSWER_TOKENS = 128
# While a model is paused, no answer comes within this time.
QUIET_S = 0.5
_OFF = NotApplicable("it would update the model: name a checkpoint of its workers with --weights")


async def _update(endpoint: Endpoint) -> str:
    """Update the weights, and return their version."""
    asked = {"weight_dir": endpoint.weights, "mode": "keep"}
    return str((await endpoint.call("/update_weights", asked))["weight_version"])


async def stale_prefix(endpoint: Endpoint) -> Outcome:
    if not endpoint.weights:
        return _OFF
    body = endpoint.body(fresh(FILLER * 20), max_tokens=4)
    before = cached_tokens(await endpoint.send(body)) or 0
    for _ in range(CACHE_TRIES):
        again = await endpoint.send(body)
        if (shared := cached_tokens(again) or 0) > before:
            break
    else:
        return NotApplicable("usage shows no cached tokens if a prompt comes again")
    version = await _update(endpoint)
    after = await endpoint.send(body)
    if (stale := cached_tokens(after) or 0) > before:
        what = f"{stale} tokens of KV from before the update to {version} were used after it"
        return CheckFailed(what, [again, after])
    return Passed(f"{shared} tokens cached before the update, {stale} after it")


async def versions(endpoint: Endpoint) -> Outcome:
    if not endpoint.weights:
        return _OFF
    prompt = fresh("Count from 1 to 1000 in words.")
    body = endpoint.body(prompt, max_tokens=UPDATED_ANSWER_TOKENS, stream=True)
    mixed, began = EndpointAnswer(body), asyncio.Event()

    async def read() -> str:
        async for chunk in endpoint.chunks(body):
            mixed.add(chunk)
            if mixed.text:
                began.set()
        began.set()
        return mixed.text

    async def update() -> str:
        await began.wait()
        return await _update(endpoint)

    _, version = await together((read(), update()))
    later = await endpoint.ask(fresh(prompt))
    if not (later.receipt or {}).get("spans"):
        return NotApplicable("no receipt says which weights sampled the tokens")
    for answer in (mixed, later):
        spans, made = (answer.receipt or {}).get("spans"), (answer.usage or {})["completion_tokens"]
        ends = [(0, 0), *((x.get("start", 0), x["end"]) for x in spans or ())]
        has_all = all(x[1] == y[0] for x, y in pairwise(ends)) and ends[-1][1] == made
        # An answer that ended before the update has no spans if there was none before.
        if (spans or answer is later) and not has_all:
            what = f"the spans of {made} tokens are {', '.join(f'{x} to {y}' for x, y in ends[1:])}"
            return CheckFailed(what, [answer])
    if others := {x["version"] for x in (later.receipt or {})["spans"]} - {version}:
        what = f"after the update to {version} tokens are of {', '.join(sorted(others))}"
        return CheckFailed(what, [later])
    return Passed(f"{len((mixed.receipt or {}).get('spans') or ())} spans over an update")


async def pause(endpoint: Endpoint) -> Outcome:
    if not endpoint.weights:
        return _OFF
    asking = None
    await endpoint.call("/pause", {"mode": "keep"})
    try:
        is_paused = (await endpoint.call("/is_paused"))["is_paused"]
        asking = asyncio.create_task(endpoint.ask(fresh(FILLER), max_tokens=4))
        await asyncio.wait({asking}, timeout=QUIET_S)
        answered = asking.done()
    finally:
        await endpoint.call("/resume", {})
        if asking is not None and not asking.done():
            try:
                await asking
            except BaseException:
                asking.cancel()
                raise
    answer = asking.result()
    if answered or not is_paused:
        said = "a request was answered" if answered else "/is_paused said no"
        return CheckFailed(f"while the model was paused, {said}", [answer])
    return Passed("a request waited until the model was resumed")


WEIGHTS_CHECKS = (
    Check(
        stale_prefix,
        "After an update of the weights no cached KV of the former ones is used",
        "SkyRL: a stale prefix raised the gradient norm from 8 to 136",
        "NovaSky-AI/SkyRL/issues/2246",
        (2 + CACHE_TRIES, (2 + CACHE_TRIES) * 4),
    ),
    Check(
        versions,
        "Each token of an answer says which weights sampled it, also if they change in the middle",
        "NeMo-RL: KV of 17 steps ago was served, and nothing said so",
        "NVIDIA-NeMo/RL/issues/4018",
        (2, UPDATED_ANSWER_TOKENS + ANSWER_TOKENS),
    ),
    Check(
        pause,
        "While a model is paused, requests wait; they are answered once it is resumed",
        "SGLang P/D: after a pause, prompts were prefilled again on another rank",
        "sgl-project/sglang/issues/40730",
        (1, 4),
    ),
)
