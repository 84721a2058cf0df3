"""`pdserve serve` with the demo model, driven as its users drive it, with real engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.client import Client
from pdserve.demo import MODEL_DIR
from pdserve.model.tokenizer import ChatMessage, Tokenizer, read_files
from pdserve.types import FinishReason, Receipt, SamplingParams
from tests.support.commands import run_cli
from tests.support.served_demo import ALIAS, EXPLAIN, LONG, MODEL
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.served_up import ServedUp

QUESTION = [{"role": "user", "content": "What is prefill?"}]
# More deaths than these in a row, and the supervisor gives up.
MOST_KILLS = 3


@pytest.fixture
async def stack(served_demo: ServedUp) -> AsyncIterator[ServedUp]:
    """Assert that every test leaves the workers empty."""
    yield served_demo
    await served_demo.until_empty()


def assert_disaggregated(receipt: dict[str, Any]) -> None:
    """Assert that the request went through prefill, transfer and decode."""
    assert receipt["prefill_worker"] == "prefill-0"
    assert receipt["decode_worker"] == "decode-0"
    assert receipt["first_token_source"] == "prefill"
    assert receipt["transfer_blocks"] > 0
    assert receipt["transfer_bytes"] > 0
    assert receipt["transport"] == "shm"
    assert receipt["fallbacks"] == []
    assert receipt["prefill_s"] > 0
    assert receipt["decode_s"] > 0


async def chat(stack: ServedUp, content: str = "What is prefill?", **more: Any) -> str:
    async with stack.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, **more
        )
    text = answer.choices[0].message.content
    assert text is not None
    return text


def assert_english(text: str) -> None:
    """Assert that the answer is a sentence about the question."""
    assert "prefill" in text.lower()
    assert text.rstrip().endswith((".", "!", "?"))
    assert len(text.split()) >= 8
    assert text.isascii()


async def test_a_chat_over_http_streams_english_through_both_workers(stack: ServedUp) -> None:
    pieces, receipt, usage = [], None, None
    async with stack.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
            if chunk.usage is not None:
                usage = chunk.usage
                receipt = (chunk.model_extra or {})["pdserve"]["receipt"]
    assert len(pieces) > 3
    assert_english("".join(pieces))
    assert "".join(pieces) == await chat(stack)
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert receipt is not None
    assert_disaggregated(receipt)


async def test_generate_over_grpc_streams_english_through_both_workers(stack: ServedUp) -> None:
    async with Client(stack.grpc) as client:
        deltas = [
            delta
            async for delta in client.generate(
                [ChatMessage("user", "What is prefill?")],
                SamplingParams(temperature=0, max_tokens=100),
            )
        ]
    assert len(deltas) > 3
    assert "".join(d.text for d in deltas) == await chat(stack)
    last = deltas[-1]
    assert last.finish_reason is FinishReason.STOP
    assert isinstance(last.receipt, Receipt)
    fields = {name: getattr(last.receipt, name) for name in Receipt.__struct_fields__}
    assert_disaggregated({**fields, "fallbacks": list(last.receipt.fallbacks)})


async def get(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return await response.text()


async def test_flags_of_vllm_serve_are_for_both_roles_or_for_one(stack: ServedUp) -> None:
    seqs = {x: y.info.limits.max_num_seqs for x, y in (await stack.statuses()).items()}
    assert (seqs["prefill-0"], seqs["decode-0"]) == (32, 48)
    async with stack.client() as client:
        assert [x.id async for x in client.models.list()] == [MODEL, ALIAS]
        answer = await client.completions.create(model=ALIAS, prompt="What", max_tokens=1)
    assert answer.model == MODEL


async def test_worker_and_router_show_kv_metrics(stack: ServedUp) -> None:
    await chat(stack)
    await stack.until_empty()
    moved: dict[str, dict[str, Any]] = {}
    for worker in [x for x in stack.ready["workers"] if x["role"] != "pooling"]:
        shown = json.loads(await get(f"http://{worker['debug']}/debug/kv"))
        assert shown["ledger"]["pinned_blocks"] == shown["quarantined_slots"] == 0
        (rank,) = shown["ranks"]
        assert rank["transfers"] == []
        assert [(x["state"], x["transport"]) for x in rank["links"]] == [("up", "shm")]
        moved[worker["worker_id"]] = shown["totals"]
    pushed = moved["prefill-0"]["pushed_bytes"]
    assert pushed == moved["decode-0"]["received_bytes"] > 0
    sample = f'pushed_bytes_total{{model="{MODEL}",role="prefill",worker="prefill-0"}} {pushed}'
    async with asyncio.timeout(WAIT_S):  # the router knows with the worker's next renewal
        while f"pdserve_worker_kv_{sample}" not in await get(f"{stack.url}/metrics"):
            pass


async def test_structured_output_holds_across_the_handoff(stack: ServedUp) -> None:
    schema = {
        "type": "object",
        "properties": {"phase": {"enum": ["prefill", "decode"]}, "n": {"type": "integer"}},
        "required": ["phase", "n"],
        "additionalProperties": False,
    }
    text = await chat(
        stack,
        "Answer in JSON.",
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(text)["phase"] in {"prefill", "decode"}


async def test_a_prompt_is_scored_as_its_answer_was(stack: ServedUp) -> None:
    async with stack.client() as client:

        async def complete(**body: Any) -> Any:
            answer = await client.completions.create(model=MODEL, temperature=0, **body)
            return answer.choices[0], (answer.model_extra or {})["pdserve"]["receipt"]

        prompt = list(Tokenizer.load(read_files(MODEL_DIR)).encode("What is prefill? It is"))
        said, _ = await complete(
            prompt=prompt, max_tokens=8, logprobs=1, extra_body={"return_token_ids": True}
        )
        whole = [*prompt, *(said.model_extra or {})["token_ids"]]
        # The prefix that is cached by now is computed again, to be scored.
        scored, receipt = await complete(prompt=[whole], max_tokens=2, logprobs=1, echo=True)
    assert_disaggregated(receipt)
    scores = scored.logprobs.token_logprobs
    assert (scores[0], len(scores)) == (None, len(whole) + 2)
    # Some CPUs round a chunk of a prompt otherwise than single tokens. Scores of another position
    # would differ by far more.
    assert scores[len(prompt) : -2] == pytest.approx(said.logprobs.token_logprobs, abs=0.02)
    assert scored.logprobs.tokens[len(prompt) : -2] == said.logprobs.tokens
    assert scored.text.startswith("What is prefill? It is" + said.text)


async def test_only_requests_with_the_same_salt_share_cached_prefixes(stack: ServedUp) -> None:
    cached: dict[str, list[int]] = {}
    async with stack.client() as client:
        for salt in ("a", "a", "b", "", "a"):
            answer = await client.completions.create(
                model=MODEL,
                prompt=f"Salted. {LONG[:600]}",
                max_tokens=2,
                extra_body={"cache_salt": salt} if salt else {},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            tokens = answer.usage.prompt_tokens_details.cached_tokens or 0
            cached.setdefault(salt, []).append(tokens)
    assert cached["b"] == cached[""] == [0]
    assert cached["a"][0] == 0
    assert min(cached["a"][1:]) > 0


async def test_verify_finds_each_promise_kept(stack: ServedUp) -> None:
    words = ("verify", stack.url, "--json", "--disaggregated", "--timeout", str(WAIT_S))
    ended = await asyncio.to_thread(run_cli, *words, within_s=START_S)
    found = {x["check"]: (x["result"], x["note"]) for x in json.loads(ended.stdout)["checks"]}
    other = {name: x for name, x in found.items() if x[0] != "holds"}
    # The demo model may pad its JSON with spaces until the answer is cut. The checks of weights
    # change the model (tests/integration/test_weights.py), and this service has no regions.
    changing, regional = {"stale_prefix", "versions", "pause"}, {"residency"}
    assert other.keys() <= {"images", "structured", "tools"} | changing | regional, other
    assert {result for result, _ in other.values()} == {"not applicable"}, other
    assert ended.returncode == 0


async def leave(stack: ServedUp, when: str, prompt: str) -> bool:
    """Asks and goes away; False where the answer was over before it had come to `when`."""
    async with stack.client() as client:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 400,
            "extra_body": {"ignore_eos": True},
        }
        if when == "in decode":
            stream = await client.completions.create(**body, stream=True)
            for _ in range(3):
                await anext(stream)
            await stream.close()
            return True
        task = asyncio.create_task(client.completions.create(**body))
        what = "engine_requests" if when != "in transfer" else "in_flight_blocks"
        caught = await stack.sees(what, task)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return caught


async def used(stack: ServedUp) -> tuple[dict[str, float], float]:
    """Return the engines' seconds by kind, and the seconds of all steps as counted by the
    workers."""
    kinds: dict[str, float] = {}
    busy_s = 0.0
    for family in text_string_to_metric_families(await get(f"{stack.url}/metrics")):
        for sample in family.samples:
            if sample.name == "pdserve_engine_seconds_total":
                kind = sample.labels["kind"]
                kinds[kind] = kinds.get(kind, 0.0) + sample.value
            busy_s += sample.value * (sample.name == "pdserve_worker_busy_seconds_total")
    return kinds, busy_s


async def test_costs_add_up_to_what_the_engines_did(stack: ServedUp) -> None:
    """The price is 1 per core and second."""
    costs: list[float] = []

    async def ask(client: Client, length: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        async with contextlib.aclosing(client.generate(f"{length} {LONG[:900]}", sampling)) as said:  # type: ignore[type-var]
            async for delta in said:
                if length > 40:
                    return  # this client leaves
                if delta.receipt is not None:
                    costs.append(delta.receipt.cost or 0.0)

    before, _ = await used(stack)
    async with Client(stack.grpc) as client:
        await asyncio.gather(*(ask(client, length) for length in (1, 2, 9, 20, 30, 40, 200, 300)))
    await stack.until_empty()
    async with asyncio.timeout(WAIT_S):  # the router knows with the workers' next renewals
        while True:
            kinds, busy_s = await used(stack)
            worked_s = sum(kinds.values()) - kinds.get("idle", 0.0)
            if kinds.get("waste", 0.0) > before.get("waste", 0.0) and worked_s == pytest.approx(
                busy_s, rel=0.01
            ):
                break
            await asyncio.sleep(0.2)
    answered_s = sum(kinds[x] - before.get(x, 0.0) for x in ("prefill", "decode"))
    (cores,) = {x.info.devices for x in (await stack.statuses()).values()}
    assert sum(costs) == pytest.approx(answered_s * cores, rel=0.01)


@pytest.mark.parametrize("when", ["queued or in prefill", "in transfer", "in decode"])
async def test_a_client_that_goes_away_leaves_nothing(stack: ServedUp, when: str) -> None:
    for number in itertools.count():
        if await leave(stack, when, f"{when} {number}. {LONG}"):
            break


BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": LONG * 8}, 400, "prompt"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "x", "surprise": 1}, 400, "surprise"),
    ({"prompt": "x", "n": 0}, 400, "n"),
    ({"prompt": [1 << 20]}, 400, "prompt"),
    ({"prompt": "x", "structured_outputs": {"regex": "(["}}, 400, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "status", "field"), BAD)
async def test_bad_input_is_refused_without_effect_on_others(
    stack: ServedUp, fields: dict[str, Any], status: int, field: str | None
) -> None:
    async with stack.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=MODEL, max_tokens=5, extra_body=fields, prompt="")
    assert caught.value.status_code == status
    assert caught.value.param is not None
    assert field is None or caught.value.param.startswith(field)
    assert_english(await chat(stack))


async def kill_in_mid_answer(
    stack: ServedUp, question: str, pid: int
) -> tuple[list[str], list[str]]:
    """Kill a process after some tokens of two answers. Return the answers and their fallbacks."""
    pieces: list[list[str]] = [[], []]
    is_killed = False
    fallbacks: list[str] = []
    async with stack.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=300,
            stream=True,
            n=2,
        )
        async for chunk in stream:
            pieces[chunk.choices[0].index].append(chunk.choices[0].delta.content or "")
            if not is_killed and min(map(len, pieces)) == 3:
                is_killed = True
                os.kill(pid, signal.SIGKILL)
            found = (chunk.model_extra or {}).get("pdserve")
            if found:
                fallbacks = found["receipt"]["fallbacks"]
    return ["".join(each) for each in pieces], fallbacks


async def test_a_killed_decode_worker_does_not_cost_its_streams(stack: ServedUp) -> None:
    """Last in this file, because the worker gets a new process id."""
    whole = await chat(stack, EXPLAIN, max_tokens=300)
    fallbacks: list[str] = []
    for _ in range(MOST_KILLS):
        decode = next(x for x in stack.ready["workers"] if x["role"] == "decode")
        texts, fallbacks = await kill_in_mid_answer(stack, EXPLAIN, decode["pid"])
        assert texts == [whole, whole]
        # The supervisor starts it again; its address is new, and the ready file says so.
        async with asyncio.timeout(START_S):
            while True:
                stack.ready = json.loads(stack.up.ready_path.read_text())
                again = next(x for x in stack.ready["workers"] if x["role"] == "decode")
                if again["pid"] != decode["pid"]:
                    with contextlib.suppress(grpc.aio.AioRpcError, openai.APIStatusError):
                        await stack.statuses()
                        break
                await asyncio.sleep(0.2)
        stack.up.watch([again["pid"]])
        if fallbacks:  # else all of it was on its way to a slow client
            break
    assert fallbacks
