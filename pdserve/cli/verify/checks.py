"""The checks of `pdserve verify`: promises of an endpoint, and how other systems broke them."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any

from pdserve.cli.verify.compare import difference, is_rounding
from pdserve.cli.verify.endpoint import (
    ANSWER_TOKENS,
    Broken,
    EndpointAnswer,
    Refused,
    together,
)
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
from pdserve.cli.verify.weights import WEIGHTS_CHECKS

if TYPE_CHECKING:
    from pdserve.cli.verify.endpoint import Body, Endpoint, EndpointChoice
    from pdserve.cli.verify.outcome import Outcome

CUT = "length"
LONG_ANSWER_TOKENS = 256
# Longest prompt that `length` sends, in words; a word is a token or more.
MOST_WORDS = 200_000
TOLERANCE = 1e-3
POLL_S = 0.2
STORM_ROUNDS = 3
LEAVE_S = 0.02
NOWHERE = "no-such-region"
QUESTIONS = ("What does prefill do?", "Name some colors and say why you like them.")
# Metrics of resources that requests hold: slots, and KV blocks that no other request can use.
HELD = (
    "pdserve_requests_running",
    "pdserve_worker_num_running_reqs",
    "pdserve_worker_kv_pinned_blocks",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "sglang:num_running_reqs",
)
# Its growth shows that KV came from another worker.
HANDED_OVER = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
PREFILL_WORKERS = 'pdserve_workers{role="prefill"}'


async def _judge(
    endpoint: Endpoint, one: EndpointAnswer, other: EndpointAnswer, what: str
) -> CheckFailed | NotApplicable | None:
    """Return the outcome of comparing two greedy answers, None if they are equal or rounding
    explains the difference."""
    if one.text == other.text:
        return None
    where = f"{what} differ {difference(one, other)}"
    match await is_rounding(endpoint, one, other):
        case True:
            return None
        case False:
            return CheckFailed(
                f"{where}; their tokens are not about equally likely there", [one, other]
            )
        case None:
            text = "the endpoint gives no logprobs that tell rounding from an error"
            return NotApplicable(f"{where}; {text}")


async def stream(endpoint: Endpoint) -> Outcome:
    prompt = fresh(QUESTIONS[0])
    asked = [endpoint.body(prompt, stream=x) for x in (False, True)]
    whole, streamed = [await endpoint.send(body) for body in asked]
    if whole.text == streamed.text:
        if whole.first.finish_reason != streamed.first.finish_reason:
            return CheckFailed("the finish reasons differ", [whole, streamed])
        return Passed()
    found = await _judge(endpoint, whole, streamed, "the whole and the streamed answer")
    if isinstance(found, NotApplicable):
        # Rounding does not recur each time; a token lost in streams does.
        again = [await endpoint.send(body) for body in asked]
        if [x.text for x in again] == [whole.text, streamed.text]:
            return CheckFailed(f"twice, {found.why}", [whole, streamed])
    return found or Passed("they part where two tokens are about equally likely")


async def repeat(endpoint: Endpoint) -> Outcome:
    # A request between two equal ones shows whether its KV leaks into the next.
    prompts = [fresh(question) for question in QUESTIONS]
    first = [await endpoint.ask(prompt) for prompt in prompts]
    for _ in range(2):
        for prompt, before in zip(prompts, first, strict=True):
            found = await _judge(endpoint, before, await endpoint.ask(prompt), "equal requests")
            if found:
                return found
    return Passed()


async def seed(endpoint: Endpoint) -> Outcome:
    pairs = []
    # Rounding changes a sample rarely, so it does not change two in a row.
    for number in (7, 8):
        body = endpoint.body(fresh(QUESTIONS[1]), temperature=1, seed=number)
        alone = await endpoint.send(body)
        other = endpoint.body(fresh(QUESTIONS[0]), temperature=1)
        beside = (await endpoint.at_once([body, other]))[0]
        if alone.text == beside.text:
            return Passed()
        pairs += [alone, beside]
    where = difference(pairs[2], pairs[3])
    return CheckFailed(f"with two seeds, answers beside another request differ {where}", pairs)


async def usage(endpoint: Endpoint) -> Outcome:
    prompt = fresh(FILLER * 10)
    whole = await (endpoint.scored if endpoint.has_logprobs else endpoint.ask)(prompt)
    streamed = await endpoint.ask(prompt, stream=True)
    for answer in (whole, streamed):
        prompted, made = _counts(answer)
        total = (answer.usage or {}).get("total_tokens")
        if total != prompted + made or not prompted:
            return CheckFailed(f"{prompted} + {made} tokens, and total_tokens is {total}", [answer])
        if made > ANSWER_TOKENS:
            return CheckFailed(f"{made} of {ANSWER_TOKENS} tokens that were asked for", [answer])
    prompted, made = _counts(whole)
    if whole.first.finish_reason == CUT and made != ANSWER_TOKENS:
        return CheckFailed(f"cut at {ANSWER_TOKENS} tokens, and {made} are counted", [whole])
    scores = len(whole.first.scores)
    # Servers differ in whether they return the token that ends an answer.
    if scores and not whole.first.reasoning and abs(made - scores) > 1:
        return CheckFailed(f"logprobs of {scores} tokens, and {made} are counted", [whole])
    if whole.text == streamed.text and _counts(whole) != _counts(streamed):
        return CheckFailed("the same answer has another usage if it is streamed", [whole, streamed])
    if (cached := cached_tokens(whole) or 0) > prompted / 2:
        return CheckFailed(
            f"{cached} of {prompted} tokens of a new prompt count as cached", [whole]
        )
    return Passed()


def _counts(answer: EndpointAnswer) -> tuple[int, int]:
    found = answer.usage or {}
    return found.get("prompt_tokens", 0), found.get("completion_tokens", 0)


async def stop(endpoint: Endpoint) -> Outcome:
    prompt = fresh(QUESTIONS[0])
    base = await endpoint.ask(prompt)
    text = base.first.text
    # From the middle of a word into the next, so that it begins and ends within tokens.
    strings = re.findall(r"\S(\S+ \S)", text)
    if not strings:
        return NotApplicable(f"the answer has too few words for a stop string: {text[:80]!r}")
    string = strings[len(strings) // 2]
    expected = text[: text.index(string)]
    for answer in [await endpoint.ask(prompt, stop=[string], stream=x) for x in (False, True)]:
        came = answer.first
        if string in came.text:
            return CheckFailed(f"the answer has the stop string {string!r}", [answer])
        if came.text.rstrip() == expected.rstrip() and came.finish_reason == "stop":
            continue
        if not came.text.startswith(expected) and not expected.startswith(came.text):
            found = await _judge(endpoint, base, answer, "answers with and without a stop string")
            return found or NotApplicable("rounding changed the answer before its stop string")
        what = f"with stop={string!r} expected {expected!r}, finished by stop"
        return CheckFailed(what, [base, answer])
    return Passed()


async def logprobs(endpoint: Endpoint) -> Outcome:
    if not endpoint.has_logprobs:
        return NotApplicable("the endpoint gives no logprobs")
    prompt = fresh(QUESTIONS[0])
    for answer in [await endpoint.scored(prompt, stream=x) for x in (False, True)]:
        if what := _wrong_scores(answer.first):
            return CheckFailed(what, [answer])
    return Passed()


def _wrong_scores(choice: EndpointChoice) -> str:
    """Return what is wrong with the logprobs of a greedy answer."""
    joined = "".join(entry["token"] for entry in choice.scores)
    # The token that ends an answer has a name, which is not in the text.
    texts = (joined, "".join(entry["token"] for entry in choice.scores[:-1]))
    # A token may hold a part of a character, and reasoning is parsed out of the text.
    if choice.text not in texts and "\ufffd" not in joined and not choice.reasoning:
        return f"the tokens make {joined!r}, the text is {choice.text!r}"
    for number, entry in enumerate(choice.scores):
        top = [x["logprob"] for x in entry.get("top_logprobs") or []]
        where = f"token {number}, {entry['token']!r}:"
        if not top:
            return f"{where} no top_logprobs"
        if max(entry["logprob"], *top) > TOLERANCE:
            return f"{where} a probability above 1"
        if top != sorted(top, reverse=True):
            return f"{where} top_logprobs are not in order: {top}"
        if (total := sum(map(math.exp, top))) > 1 + TOLERANCE:
            return f"{where} top_logprobs sum to {total:.4f}"
        if abs(entry["logprob"] - top[0]) > TOLERANCE:
            return f"{where} its logprob is {entry['logprob']}, that of the likeliest {top[0]}"
    return ""


SCHEMA = {
    "type": "object",
    "properties": {"phase": {"enum": ["prefill", "decode"]}, "fast": {"type": "boolean"}},
    "required": ["phase", "fast"],
    "additionalProperties": False,
}


def _misfit(text: str) -> str:
    """Return why a JSON text does not fit SCHEMA."""
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"not JSON ({error})"
    match found:
        case {"phase": "prefill" | "decode", "fast": True | False, **others} if not others:
            return ""
    return "not of the schema"


async def structured(endpoint: Endpoint) -> Outcome:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    prompt = fresh("Say hello in one sentence. Do not write JSON.")
    for answer in [
        await endpoint.ask(prompt, response_format=form, max_tokens=64, stream=x)
        for x in (False, True)
    ]:
        text, is_cut = answer.first.text, answer.first.finish_reason == CUT
        if is_cut and (not text or text.lstrip().startswith("{")):
            return NotApplicable(f"the answer was not whole at 64 tokens: {text[:80]!r}")
        if why := _misfit(text):
            return CheckFailed(f"the answer is {why}: {text[:80]!r}", [answer])
    return Passed()


async def tools(endpoint: Endpoint) -> Outcome:
    function = {"name": "set_phase", "description": "Set the phase.", "parameters": SCHEMA}
    chosen = {"type": "function", "function": {"name": "set_phase"}}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": chosen,
        "max_tokens": 96,
    }
    prompt = fresh("Set the phase to decode, and say that it is fast.")
    for answer in [await endpoint.ask(prompt, stream=x, **fields) for x in (False, True)]:
        calls, streamed = list(answer.first.tool_calls.values()), answer.request.get("stream")
        # A server may return the beginning of a call as text.
        has_begun = bool(calls) or "set_phase" in answer.first.text
        if has_begun and answer.first.finish_reason == CUT:
            return NotApplicable("the call was not whole at 96 tokens")
        if [call["name"] for call in calls] != ["set_phase"]:
            how = "streamed" if streamed else "whole"
            return CheckFailed(f"expected one call of set_phase in the {how} answer", [answer])
        if why := _misfit(calls[0]["arguments"]):
            return CheckFailed(f"the arguments are {why}: {calls[0]['arguments'][:80]!r}", [answer])
    return Passed()


async def choices(endpoint: Endpoint) -> Outcome:
    prompt = fresh(QUESTIONS[1])
    for answer in [await endpoint.ask(prompt, n=3, temperature=1, stream=x) for x in (False, True)]:
        if (found := sorted(answer.choices)) != [0, 1, 2]:
            return CheckFailed(f"asked for 3 answers, got those of index {found}", [answer])
        if not all(choice.finish_reason for choice in answer.choices.values()):
            return CheckFailed("an answer has no end", [answer])
        made = (answer.usage or {}).get("completion_tokens")
        all_cut = all(x.finish_reason == CUT for x in answer.choices.values())
        if made is not None and all_cut and made != 3 * ANSWER_TOKENS:
            return CheckFailed(f"3 × {ANSWER_TOKENS} tokens came, and {made} are counted", [answer])
    return Passed()


async def _leave(endpoint: Endpoint, body: Body, after: int) -> bool:
    """Close the connection after so many chunks with text; after 0, soon. Return False if the
    answer had ended."""
    partial, chunks, seen = EndpointAnswer(body), endpoint.chunks(body), 0
    try:
        async with asyncio.timeout(None if after else LEAVE_S):
            async for chunk in chunks:
                length = len(partial.text)
                partial.add(chunk)
                seen += len(partial.text) > length
                if after and seen >= after:
                    break
    except TimeoutError:
        pass
    finally:
        await chunks.aclose()
    return not partial.first.finish_reason


async def abort(endpoint: Endpoint) -> Outcome:
    before = await endpoint.metrics()
    prompt = fresh("Count from 1 to 1000 in words.")
    body = endpoint.body(prompt, max_tokens=LONG_ANSWER_TOKENS, stream=True)
    slots = range(endpoint.concurrency)
    left = [await together(_leave(endpoint, body, 1) for _ in slots) for _ in range(2)]
    if not any(map(any, left)):
        return NotApplicable("each answer ended before it could be aborted")
    await endpoint.at_once([endpoint.body(fresh(QUESTIONS[0]), max_tokens=4) for _ in slots])
    if not any(name in before for name in HELD):
        return Passed("later requests are answered; no /metrics shows what is held")
    for _ in range(1 + round(endpoint.timeout_s / 2 / POLL_S)):
        now = await endpoint.metrics()
        more = [
            f"{name} is {now[name]:g} and was {before.get(name, 0):g}"
            for name in HELD
            if now.get(name, 0) > before.get(name, 0)
        ]
        if not more:
            return Passed("as /metrics shows")
        await asyncio.sleep(POLL_S)
    return CheckFailed(
        f"after {sum(map(sum, left))} aborts {', '.join(more)}", [EndpointAnswer(body)]
    )


async def storm(endpoint: Endpoint) -> Outcome:
    # The same questions again and again, as an audit would ask them: KV of requests that were
    # aborted must not get into the answers of others, neither at once nor later.
    prompts = [fresh(question) for question in QUESTIONS]
    first = [await endpoint.ask(prompt) for prompt in prompts]
    left = 0
    for _ in range(STORM_ROUNDS):
        bodies = [
            endpoint.body(fresh(FILLER * 4), max_tokens=LONG_ANSWER_TOKENS, stream=True)
            for _ in range(endpoint.concurrency)
        ]
        left += sum(await together(_leave(endpoint, body, n % 4) for n, body in enumerate(bodies)))
        for prompt, before in zip(prompts, first, strict=True):
            what = f"after {left} aborts equal requests"
            if found := await _judge(endpoint, before, await endpoint.ask(prompt), what):
                return found
    if not left:
        return NotApplicable("each answer ended before it could be aborted")
    return Passed(f"{left} aborts at once, in prefill and in decode")


async def residency(endpoint: Endpoint) -> Outcome:
    answer = await endpoint.ask(fresh(QUESTIONS[0]), max_tokens=4)
    shown = str((answer.usage or {}).get("inference_geo") or "")
    if not shown:
        return NotApplicable("its usage does not say in which regions it answered")
    region = shown.split("+")[0]
    bound = await endpoint.ask(fresh(QUESTIONS[0]), max_tokens=4, inference_geo=region)
    served = str((bound.usage or {}).get("inference_geo") or "")
    if served != region:
        return CheckFailed(f"a request bound to {region!r} was answered in {served!r}", [bound])
    try:
        body = endpoint.body(fresh(QUESTIONS[0]), max_tokens=4, inference_geo=NOWHERE)
        elsewhere = await endpoint.send(body)
    except (Refused, Broken):
        return Passed(f"{region}; what usage says was not compared with where data really was")
    return CheckFailed(f"a request bound to {NOWHERE!r} was answered", [elsewhere])


async def length(endpoint: Endpoint) -> Outcome:
    limit = endpoint.max_model_len
    if not limit:
        return NotApplicable("/v1/models has no max_model_len")
    if limit > MOST_WORDS:
        return NotApplicable(f"a prompt above {limit} tokens is longer than this sends")
    words = limit + 16
    for streamed in (False, True):
        body = endpoint.body("word " * words, max_tokens=4, stream=streamed)
        try:
            answer = await endpoint.send(body)
        except Refused as refused:
            numbers = [int(x) for x in re.findall(r"\d+", refused.message.replace(",", ""))]
            if limit not in numbers or not any(x > limit for x in numbers):
                what = f"'word ' × {words} is refused without its length and the limit {limit}"
                return CheckFailed(f"{what}: {refused}", [EndpointAnswer(body)])
        else:
            what = f"'word ' × {words} is accepted, and the context is {limit} tokens"
            return CheckFailed(what, [answer])
    await endpoint.ask(fresh(QUESTIONS[0]), max_tokens=4)
    return Passed()


async def concurrency(endpoint: Endpoint) -> Outcome:
    # Different lengths, so that prompts are computed beside running answers.
    questions = [
        f"{FILLER * (i % 4)}{QUESTIONS[i % 2]} (Question {i}.)" for i in range(endpoint.concurrency)
    ]
    bodies = [endpoint.body(fresh(question)) for question in questions]
    # Concurrently first, so that new prompts are handed over under load.
    crowded = [await endpoint.at_once(bodies) for _ in range(2)]
    alone = [await endpoint.send(body) for body in bodies]
    doubts = []
    for answers in crowded:
        for one, other in zip(alone, answers, strict=True):
            found = await _judge(endpoint, one, other, "the answer alone and that beside others")
            if isinstance(found, CheckFailed):
                swapped = any(other.text == x.text for x in alone)
                note = "; it is the answer to another request" if swapped else ""
                return CheckFailed(found.what + note, found.answers)
            doubts += [found] if found else []
    return doubts[0] if doubts else Passed()


def solid_png(red: int, green: int, blue: int) -> str:
    """Return an image of 64 by 64 pixels of one color, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    rows = (b"\0" + bytes((red, green, blue)) * 64) * 64
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    png = b"\x89PNG\r\n\x1a\n" + header + pixels
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


async def images(endpoint: Endpoint) -> Outcome:
    question = "What is the dominant color of this image? Answer with one word: red or blue."
    pngs = {"red": solid_png(255, 0, 0), "blue": solid_png(0, 0, 255)}

    def content(color: str, text: str) -> list[Body]:
        image = {"type": "image_url", "image_url": {"url": pngs[color]}}
        return [image, {"type": "text", "text": text}]

    # Separate texts, so that a cache that ignores the image cannot confuse them.
    seen = {x: await endpoint.ask(content(x, fresh(question))) for x in pngs}
    names_colors = all(_colors(answer) == {x} for x, answer in seen.items())
    same = fresh(question)
    alone = {x: await endpoint.ask(content(x, same)) for x in pngs}
    plain = await endpoint.ask([{"type": "text", "text": same}])
    if plain.usage and alone["red"].usage and _counts(plain)[0] >= _counts(alone["red"])[0]:
        return CheckFailed("an image adds no tokens to the prompt", [plain, alone["red"]])
    order = [*pngs, *pngs]
    crowded = await endpoint.at_once([endpoint.body(content(x, same)) for x in order])
    other = {"red": "blue", "blue": "red"}
    for color, answer in (*alone.items(), *zip(order, crowded, strict=True)):
        if names_colors and _colors(answer) == {other[color]}:
            what = f"the {color} image is called {other[color]}"
            return CheckFailed(what, [alone[other[color]], answer])
        if answer.text == alone[other[color]].text != alone[color].text:
            what = f"an answer to the {color} image is that to the {other[color]} one"
            return CheckFailed(what, [alone[other[color]], answer])
    if names_colors:
        return Passed()
    if alone["red"].text == alone["blue"].text:
        alike = alone["red"].text[:80]
        return NotApplicable(f"the model answers alike for a red and a blue image: {alike!r}")
    return Passed("the model names no colors; its answers differ with the image")


def _colors(answer: EndpointAnswer) -> set[str]:
    return set(re.findall(r"\b(?:red|blue)\b", answer.text.lower()))


async def salt(endpoint: Endpoint) -> Outcome:
    prompt = fresh(FILLER * 20)

    async def ask(salt: str) -> tuple[EndpointAnswer, int | None]:
        answer = await endpoint.ask(prompt, cache_salt=salt, max_tokens=4)
        return answer, cached_tokens(answer)

    one, other = fresh("one"), fresh("other")
    _, before = await ask(one)
    for _ in range(CACHE_TRIES):
        same, shared = await ask(one)
        if shared:
            break
    else:
        return NotApplicable("usage shows no cached tokens if a prompt comes again")
    answer, leaked = await ask(other)
    if (leaked or 0) > (before or 0):
        return CheckFailed(
            f"{leaked} tokens were cached by requests of another salt", [same, answer]
        )
    return Passed(f"{shared} tokens cached with the same salt, {leaked or 0} with another")


async def disaggregation(endpoint: Endpoint) -> Outcome:
    before, answers = await endpoint.metrics(), []
    # Concurrently, because an idle service may rightly serve a request on one worker.
    for _ in range(2):
        bodies = [endpoint.body(fresh(FILLER * 40)) for _ in range(endpoint.concurrency)]
        answers += await endpoint.at_once(bodies)
    for receipt in (answer.receipt or {} for answer in answers):
        workers = receipt.get("prefill_worker"), receipt.get("decode_worker")
        if receipt.get("transfer_blocks") and workers[0] != workers[1]:
            moved = f"{receipt['transfer_blocks']} KV blocks"
            return Passed(f"{moved} moved from {workers[0]} to {workers[1]}, says a receipt")
    after = await endpoint.metrics()
    if (grown := after.get(HANDED_OVER, 0) - before.get(HANDED_OVER, 0)) > 0:
        return Passed(f"{HANDED_OVER} grew by {grown:g}")
    why = f"no sign of a hand-over in {len(answers)} new prompts"
    if endpoint.is_claimed or before.get(PREFILL_WORKERS):
        return CheckFailed(f"{why}, and prefill workers are said to exist", answers[:1])
    return NotApplicable(f"{why}, and nothing claims it (--disaggregated would)")


CHECKS = (
    Check(
        stream,
        "A streamed answer is the whole answer, and its stream has an end",
        "vLLM: tokens were missing in streams",
        "vllm-project/vllm/issues/30099",
        (5, 5 * ANSWER_TOKENS),
    ),
    Check(
        repeat,
        "Greedy requests give the same answer again, whatever comes between them",
        "vLLM over NIXL: HTTP 200 with garbage, or with the answer to an earlier prompt",
        "vllm-project/vllm/issues/52234",
        (10, 10 * ANSWER_TOKENS),
    ),
    Check(
        seed,
        "A seed gives the same sample again, also beside another request",
        "vLLM on CPUs: the seed was ignored beside a request without one",
        "vllm-project/vllm/issues/51226",
        (6, 6 * ANSWER_TOKENS),
    ),
    Check(
        usage,
        "Usage adds up, streamed or not; a new prompt is not called cached",
        "TensorRT-LLM P/D: whole new prompts counted as cached",
        "NVIDIA/TensorRT-LLM/pull/13620",
        (2, 2 * ANSWER_TOKENS),
    ),
    Check(
        stop,
        "A stop string ends the answer before it, streamed or not",
        "SMG: parts of stop words leaked into streams",
        "smg-project/smg/pull/2203",
        (4, 4 * ANSWER_TOKENS),
    ),
    Check(
        logprobs,
        "Logprobs fit the tokens of the text, are in order and sum to at most 1",
        "TensorRT-LLM P/D: logprobs were not handed over from prefill to decode",
        "NVIDIA/TensorRT-LLM/pull/11727",
        (2, 2 * ANSWER_TOKENS),
    ),
    Check(
        structured,
        "A JSON schema binds the answer, whatever the prompt says",
        "vLLM: guided decoding was accepted and not applied",
        "vllm-project/vllm/issues/13038",
        (2, 2 * 64),
    ),
    Check(
        tools,
        "A chosen tool is called once with arguments of its schema, streamed or not",
        "vLLM: a streamed call came without its arguments",
        "vllm-project/vllm/issues/11392",
        (2, 2 * 96),
    ),
    Check(
        choices,
        "n=3 gives three answers with an end, and usage counts all",
        "SGLang P/D: requests with n above 1 hung",
        "sgl-project/sglang/pull/30723",
        (2, 6 * ANSWER_TOKENS),
    ),
    Check(
        abort,
        "Clients that go away leave nothing behind that later requests wait for",
        "Dynamo P/D: blocks of aborted requests leaked until prefill hung",
        "ai-dynamo/dynamo/pull/7489",
        per_slot=(3, 2 * LONG_ANSWER_TOKENS + 4),
    ),
    Check(
        storm,
        "Equal greedy requests give the same answer for as long as other clients come and leave",
        "vLLM P/D: a request aborted while KV came and went ended the engine",
        "vllm-project/vllm/issues/46240",
        (10, 10 * ANSWER_TOKENS),
        (STORM_ROUNDS, STORM_ROUNDS * LONG_ANSWER_TOKENS),
    ),
    Check(
        length,
        "A prompt beyond the context is refused with its length and the limit",
        "SGLang P/D: the answer to a prompt that is too long was garbage",
        "sgl-project/sglang/issues/30233",
        (3, 12),
    ),
    Check(
        concurrency,
        "Greedy answers are the same alone and beside others",
        "SGLang P/D: first tokens of other requests under load",
        "sgl-project/sglang/issues/17259",
        per_slot=(5, 5 * ANSWER_TOKENS),
    ),
    Check(
        images,
        "Each answer is about the image of its own request",
        "SMG P/D: answered from the image of another request",
        "smg-project/smg/pull/2365",
        (9, 9 * ANSWER_TOKENS),
    ),
    Check(
        salt,
        "Requests with another cache_salt get no prefix of these",
        "SGLang with LMCache: tenants shared prefixes across salts",
        "sgl-project/sglang/issues/37160",
        (2 + CACHE_TRIES, (2 + CACHE_TRIES) * 4),
    ),
    Check(
        residency,
        "A request bound to a region is answered there, or not at all",
        "Goose: a failed request could be sent again to another region",
        "aaif-goose/goose/issues/12316",
        (3, 12),
    ),
    Check(
        disaggregation,
        "Where P/D is claimed, KV really moves between workers",
        "Modelplane: 0 requests reached prefill in a whole benchmark",
        "modelplaneai/modelplane/pull/175",
        per_slot=(2, 2 * ANSWER_TOKENS),
    ),
    *WEIGHTS_CHECKS,
)
