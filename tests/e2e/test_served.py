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
from pdserve.tokenizer import ChatMessage, Tokenizer, read_files
from pdserve.types import FinishReason, Receipt, SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from tests.patience import START_S, WAIT_S
from tests.up_process import UpProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MODEL, ALIAS = "pdserve-demo", "gpt-4"
QUESTION = [{"role": "user", "content": "What is prefill?"}]
# More deaths than these in a row, and the supervisor gives up.
MOST_KILLS = 3
LONG = "Prefill and decode are two phases of one request. " * 400
EXPLAIN = "Explain disaggregated serving in detail."


class Stack:
    """A running `pdserve serve` and what its ready file says."""

    def __init__(self, up: UpProcess) -> None:
        self.up = up
        self.ready: dict[str, Any] = up.wait_until_serving(within_s=START_S)
        self.http: str = self.ready["http"]
        self.grpc: str = self.ready["grpc"]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0)

    async def statuses(self) -> list[w.WorkerStatus]:
        """What each worker says of itself."""
        found = []
        for worker in self.ready["workers"]:
            async with grpc.aio.insecure_channel(worker["address"]) as channel:
                found.append(
                    await WorkerStub(channel).GetStatus(w.GetStatusRequest(), timeout=WAIT_S)
                )
        return found

    async def until_empty(self) -> None:
        """No block is pinned, no request held, on either worker."""
        async with asyncio.timeout(WAIT_S):
            while any(
                s.ledger.pinned_blocks or s.ledger.transfers or s.ledger.engine_requests
                for s in await self.statuses()
            ):
                pass

    async def sees(self, what: str, task: asyncio.Task[Any]) -> bool:
        """Waits until some worker's ledger counts `what`; False where the task was over first."""
        while not task.done():
            if any(getattr(s.ledger, what) for s in await self.statuses()):
                return True
        return False


def prompts_as_logged() -> list[str]:
    """What prompts of this file would look like in a log: as text, and as lists of tokens."""
    encode, texts = Tokenizer.load(read_files(MODEL_DIR)).encode, [LONG[:49], EXPLAIN]
    return texts + [str(encode(x, add_special_tokens=False)[1:6])[1:-1] for x in texts]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # With one worker of each role every policy places alike; this one asks what is cached.
    policy = ("--set", "router.policy=prefix_aware", "--set", "router.prices.cpu=3600")
    flags = (
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--max-num-seqs",
        "32",
        "--decode.max-num-seqs=48",
    )
    names = ("--served-model-name", MODEL, ALIAS)
    directory = tmp_path_factory.mktemp("up")
    up = UpProcess(directory, "demo", *flags, *names, *policy, command="serve")
    try:
        yield Stack(up)
        up.send(signal.SIGINT)
        assert up.wait() == 0, up.output
        assert up.survivors() == []
        # Whatever was asked in this file, and however it ended, no process has logged it.
        assert "decode-0" in up.output
        assert [x for x in prompts_as_logged() if x in up.output] == []
    finally:
        up.close()


@pytest.fixture
async def stack(running: Stack) -> AsyncIterator[Stack]:
    """Every test leaves the workers empty."""
    yield running
    await running.until_empty()


def assert_disaggregated(receipt: dict[str, Any]) -> None:
    """The proof that the request went the whole way."""
    assert receipt["prefill_worker"] == "prefill-0"
    assert receipt["decode_worker"] == "decode-0"
    assert receipt["first_token_source"] == "prefill"
    assert receipt["transfer_blocks"] > 0
    assert receipt["transfer_bytes"] > 0
    assert receipt["transport"] == "shm"
    assert receipt["fallbacks"] == []
    assert receipt["prefill_s"] > 0
    assert receipt["decode_s"] > 0


async def chat(stack: Stack, content: str = "What is prefill?", **more: Any) -> str:
    async with stack.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, **more
        )
    text = answer.choices[0].message.content
    assert text is not None
    return text


def assert_english(text: str) -> None:
    """Words, a sentence, and about the question."""
    assert "prefill" in text.lower()
    assert text.rstrip().endswith((".", "!", "?"))
    assert len(text.split()) >= 8
    assert text.isascii()


async def test_a_chat_over_http_streams_english_through_both_workers(stack: Stack) -> None:
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


async def test_generate_over_grpc_streams_english_through_both_workers(stack: Stack) -> None:
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
    fields = {name: getattr(last.receipt, name) for name in Receipt.__slots__}
    assert_disaggregated({**fields, "fallbacks": list(last.receipt.fallbacks)})


async def get(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        return await response.text()


async def test_flags_of_vllm_serve_are_for_both_roles_or_for_one(stack: Stack) -> None:
    assert [x.info.max_num_seqs for x in await stack.statuses()] == [32, 48]
    async with stack.client() as client:
        assert [x.id async for x in client.models.list()] == [MODEL, ALIAS]
        answer = await client.completions.create(model=ALIAS, prompt="What", max_tokens=1)
    assert answer.model == MODEL


async def test_worker_and_router_show_what_the_kv_plane_has_done(stack: Stack) -> None:
    await chat(stack)
    await stack.until_empty()
    moved: dict[str, dict[str, Any]] = {}
    for worker in stack.ready["workers"]:
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
        while f"pdserve_worker_kv_{sample}" not in await get(f"{stack.http}/metrics"):
            pass


async def test_structured_output_holds_across_the_handoff(stack: Stack) -> None:
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


async def test_a_prompt_is_scored_as_its_answer_was(stack: Stack) -> None:
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
    assert scores[len(prompt) : -2] == pytest.approx(said.logprobs.token_logprobs, abs=1e-3)
    assert scored.logprobs.tokens[len(prompt) : -2] == said.logprobs.tokens
    assert scored.text.startswith("What is prefill? It is" + said.text)


async def test_only_requests_with_the_same_salt_share_cached_prefixes(stack: Stack) -> None:
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


async def leave(stack: Stack, when: str, prompt: str) -> bool:
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


async def used(stack: Stack) -> tuple[dict[str, float], float]:
    """Seconds of engines by kind, and those of all their steps by the workers' own count."""
    kinds: dict[str, float] = {}
    busy_s = 0.0
    for family in text_string_to_metric_families(await get(f"{stack.http}/metrics")):
        for sample in family.samples:
            if sample.name == "pdserve_engine_seconds_total":
                kind = sample.labels["kind"]
                kinds[kind] = kinds.get(kind, 0.0) + sample.value
            busy_s += sample.value * (sample.name == "pdserve_worker_busy_seconds_total")
    return kinds, busy_s


async def test_costs_add_up_to_what_the_engines_did(stack: Stack) -> None:
    """One core costs 1 a second."""
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
    (cores,) = {x.info.devices for x in await stack.statuses()}
    assert sum(costs) == pytest.approx(answered_s * cores, rel=0.01)


@pytest.mark.parametrize("when", ["queued or in prefill", "in transfer", "in decode"])
async def test_a_client_that_goes_away_leaves_nothing(stack: Stack, when: str) -> None:
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
async def test_bad_input_is_refused_and_hurts_nobody(
    stack: Stack, fields: dict[str, Any], status: int, field: str | None
) -> None:
    async with stack.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=MODEL, max_tokens=5, extra_body=fields, prompt="")
    assert caught.value.status_code == status
    assert caught.value.param is not None
    assert field is None or caught.value.param.startswith(field)
    assert_english(await chat(stack))


async def kill_in_mid_answer(stack: Stack, question: str, pid: int) -> tuple[list[str], list[str]]:
    """(two answers, their fallbacks): the process is killed when some of both is here."""
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


async def test_a_killed_decode_worker_does_not_cost_its_streams(stack: Stack) -> None:
    """Last in this file: the worker is started again, under a new process id."""
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
