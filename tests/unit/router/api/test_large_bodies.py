"""Large bodies are read in a process: with the same result, and without harm to the router."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from conftest import read_tokenizer

from pdserve.config import SloConfig
from pdserve.errors import InvalidRequest, Overloaded
from pdserve.model.token_ids import TokenIds
from pdserve.model.tokenizer import Tokenizer
from pdserve.types import ModelInfo
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.api.batch.http import CreateBatchRequest
from router.api.models import LoadAdapterRequest, UnloadAdapterRequest
from router.api.route_table import ROUTES
from router.api.weights import CollectiveRpcBody, PauseBody, UpdateWeightsBody
from router.dialects import fields as bodies
from router.dialects.generation_rpc import GenerateMessage
from router.dialects.openai import ChatRequest, CompletionRequest
from router.intake import body_processes, body_reader
from router.intake.body_processes import COMMAND, BodyProcesses, default_processes
from router.metrics import RouterMetrics
from tests.support.router_apis import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    chat,
    completion,
)
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from pdserve.types import GenerateRequest
    from router.dialects.fields import Body
    from tests.support.router_apis import RouterApis

LARGE = 2048
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.fixture
def large() -> int:
    return LARGE


def padded(body: object) -> bytes:
    """Return the body, padded to a large one."""
    return json.dumps(body).encode() + b" " * LARGE


def what_was_asked(request: GenerateRequest) -> dict[str, Any]:
    names = ("model", "prompt_token_ids", "sampling", "resume", "priority")
    more = ("cache_salt", "stale_kv", "service_class", "parsing")
    return {name: getattr(request, name) for name in (*names, *more)}


TALK = [
    {"role": "system", "content": "s"},
    {"role": "assistant", "tool_calls": [CALL], "reasoning": "r"},
    {"role": "tool", "content": "t", "tool_call_id": "1"},
    {"role": "user", "content": [{"type": "text", "text": "é"}], "name": "n"},
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "b"},
]
GENERATING = [
    (CHAT, chat(messages=TALK, seed=1, logit_bias={"3": 1}, chat_template_kwargs={"style": "x"})),
    (
        CHAT,
        chat(continue_final_message=True, stop=["a", "b"], n=2, cache_salt="c", stale_kv="abort"),
    ),
    (CHAT, chat(tools=[TOOL])),
    (COMPLETIONS, completion(prompt=["a", "bc"], max_tokens=3, resume_token_ids=[])),
    (COMPLETIONS, completion(prompt=[1, 2, 3], max_tokens=5, resume_token_ids=[4, 5])),
    (COMPLETIONS, completion(echo=True, logprobs=1, add_special_tokens=False)),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}),
    (MESSAGES, {"messages": [{"role": "user", "content": "a"}], "system": "s", "max_tokens": 4}),
    (RESPONSES, {"input": ITEMS, "instructions": "i", "reasoning": {"effort": "low"}}),
    (RESPONSES, {"input": "a", "store": False}),
]
TOKENISING = [
    ("/tokenize", {"prompt": "é"}),
    ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [70, 71]}),
    (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
]
REFUSED = [
    (CHAT, chat(messages=[{"role": "user"}])),
    (CHAT, chat(messages=[{"role": "user", "content": "a" * 100}])),
    (CHAT, chat(model="none")),
    (COMPLETIONS, completion(prompt=[VOCAB_SIZE])),
    (COMPLETIONS, completion(prompt=[1] * MAX_MODEL_LEN)),
    (COMPLETIONS, completion(prompt=["a", ""])),
    (COMPLETIONS, completion(other=1)),
    (MESSAGES, {"messages": [], "max_tokens": 1}),
    (RESPONSES, {"input": [{"type": "image"}]}),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_none"}),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}),
]


async def test_a_large_body_asks_for_the_same_as_a_small_one(apis: RouterApis) -> None:
    for path, body in GENERATING:
        asked = []
        for data in (json.dumps(body).encode(), padded(body)):
            apis.generator.requests.clear()
            status, answer = await apis.post(path, data)
            assert status == 200, answer
            asked.append([what_was_asked(x) for x in apis.generator.requests])
        assert asked[0] == asked[1], path
    for path, body in TOKENISING:
        assert await apis.post(path, padded(body)) == await apis.post(path, body)
    for path, body in REFUSED:
        status, large = await apis.post(path, padded(body))
        _, small = await apis.post(path, body)
        for answer in (large, small):
            answer.pop("request_id", None)
        assert large == small
        assert status >= 400


async def test_a_large_conversation_is_stored_and_continued(apis: RouterApis) -> None:
    _, first = await apis.post(RESPONSES, padded({"input": ITEMS}))
    small = {"input": "c", "previous_response_id": first["id"]}
    await apis.post(RESPONSES, small)
    await apis.post(RESPONSES, padded(small))
    _, again, by_process = apis.generator.requests
    assert again.prompt_token_ids == by_process.prompt_token_ids


@pytest.mark.parametrize("large", [450])
async def test_a_small_body_that_continues_a_large_conversation_is_large(
    apis: RouterApis, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"type": "input_text", "text": "a"}
    item = {"role": "user", "content": [part] * 8}
    _, first = await apis.post(RESPONSES, {"input": [item]})
    monkeypatch.setattr(Tokenizer, "encode", None)
    status, answer = await apis.post(RESPONSES, {"input": "c", "previous_response_id": first["id"]})
    assert status == 200, answer


async def test_the_router_does_not_decode_or_render_a_large_body(
    apis: RouterApis, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[str, int]] = []

    def spy(kind: type[Body], data: bytes) -> Body:
        decoded.append((kind.__name__, len(data) > 2 * LARGE))
        return read(kind, data)

    read = bodies.read
    monkeypatch.setattr(bodies, "read", spy)
    for name in ("encode", "render_chat"):
        monkeypatch.setattr(Tokenizer, name, None)
    assert (await apis.post(CHAT, padded(chat()) + b" " * LARGE))[0] == 200
    assert decoded == [("Names", True), ("ChatRequest", False)]


async def test_a_large_rpc_asks_for_the_same_as_a_small_one(apis: RouterApis) -> None:
    talk = g.ChatMessages(messages=[g.ChatMessage(role="user", content="a")])
    prompts = ({"text": "a"}, {"token_ids": g.TokenIds(ids=[1, 2])}, {"messages": talk})
    async with grpc.aio.insecure_channel(apis.grpc_address) as channel:
        stub: Any = GenerationStub(channel)

        async def ask(**fields: Any) -> None:
            async for _ in stub.Generate(g.GenerateRequest(**fields), timeout=WAIT_S):
                pass

        for prompt in prompts:
            await ask(**prompt, cache_salt="c")
            await ask(**prompt, cache_salt="c" * LARGE)
            small, large = map(what_was_asked, apis.generator.requests[-2:])
            assert small == large | {"cache_salt": "c"}
        talk.messages.add(role="assistant", reasoning="x" * LARGE)
        with pytest.raises(grpc.aio.AioRpcError, match="'messages' has 2049 characters"):
            await ask(messages=talk)


# The process itself.


class Ask:
    """Parse a chat in a process."""

    def __init__(self, pool: BodyProcesses, model: ModelInfo, tokenizer: Tokenizer) -> None:
        self.pool, self._model, self._tokenizer = pool, model, tokenizer
        self.process = pool._processes[0]
        self.loads = 0

    async def __call__(self, text: str = "hi", **more: Any) -> int:
        """Return the number of tokens."""
        body = chat(messages=[{"role": "user", "content": text}], **more)
        data = json.dumps(body).encode()
        return await self._read(ChatRequest.__name__, data)

    async def of_ids(self, token_ids: list[int]) -> int:
        """Return the number of tokens of a completion's prompt."""
        data = json.dumps({"model": MODEL, "prompt": token_ids}).encode()
        return await self._read(CompletionRequest.__name__, data)

    async def _read(self, kind: str, data: bytes) -> int:
        done = await self.pool.read(kind, data, self._model, self._load)
        return len(TokenIds(*done.tokens[0]))

    async def _load(self) -> Tokenizer:
        self.loads += 1
        return self._tokenizer

    @property
    def pid(self) -> int:
        child = self.process._child
        assert child is not None
        assert child.process is not None
        return child.process.pid


@pytest.fixture
async def make_ask(model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[BodyProcesses] = []

    async def make(*command: str, **options: Any) -> Ask:
        pool = BodyProcesses(RouterMetrics(SloConfig()), command or COMMAND, **options)
        made.append(pool)
        model = ModelInfo(MODEL, str(model_dir), 1 << 20, VOCAB_SIZE, "float32")
        return Ask(pool, model, await read_tokenizer(model))

    yield make
    for pool in made:
        await pool.close()


async def test_a_process_that_dies_is_replaced_and_its_body_tried_again(make_ask: Any) -> None:
    ask = await make_ask()
    tokens = await ask()
    os.kill(ask.pid, signal.SIGSTOP)
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    os.kill(ask.pid, signal.SIGKILL)
    assert await asyncio.wait_for(asking, WAIT_S) == tokens


async def test_only_text_needs_a_tokenizer(make_ask: Any) -> None:
    ask = await make_ask()
    assert await ask.of_ids([1, 2, 3]) == 3
    assert not ask.loads
    assert await ask() > 0
    assert await ask() > 0
    assert ask.loads == 1


DIES_TWICE = """
import pathlib, sys
from router.intake import body_reader
path = pathlib.Path(sys.argv.pop(1))
starts = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (starts + 1))
if starts < 2:
    sys.exit(1)
body_reader.main()
"""


async def test_a_body_on_which_two_processes_die_is_refused_and_the_next_one_is_read(
    make_ask: Any, tmp_path: Path
) -> None:
    ask = await make_ask(sys.executable, "-c", DIES_TWICE, str(tmp_path / "starts"))
    with pytest.raises(InvalidRequest, match="ended the process"):
        await ask()
    assert await ask() > 0


async def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_read(
    make_ask: Any,
) -> None:
    ask = await make_ask()
    await ask()
    child = ask.process._child
    assert child is not None
    os.kill(ask.pid, signal.SIGSTOP)
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    child._heard_at -= body_processes.TIMEOUT_S
    child._check()
    with pytest.raises(InvalidRequest, match="takes longer than"):
        await asking
    assert await ask() > 0


async def test_a_body_that_needs_too_much_memory_is_refused_and_the_next_one_is_read(
    make_ask: Any,
) -> None:
    ask = await make_ask(memory_mib=64)
    with pytest.raises(InvalidRequest, match="too much memory"):
        await ask(chat_template_kwargs={"a": [{}] * 1_000_000})
    assert await ask() > 0


FAILS_TO_LOAD_ONCE = """
from pdserve.model.tokenizer import Tokenizer
from router.intake import body_reader
load = Tokenizer.load
def fail(files):
    Tokenizer.load = load
    raise MemoryError
Tokenizer.load = fail
body_reader.main()
"""


async def test_a_tokenizer_that_a_process_could_not_load_is_sent_again(make_ask: Any) -> None:
    ask = await make_ask(sys.executable, "-c", FAILS_TO_LOAD_ONCE)
    with pytest.raises(InvalidRequest, match="too much memory"):
        await ask()
    assert await ask() > 0


async def test_a_client_that_leaves_ends_the_process_only_if_that_is_slow(make_ask: Any) -> None:
    ask = await make_ask()
    await ask()
    pid = ask.pid
    leaving = asyncio.create_task(ask())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await ask() > 0
    assert ask.pid == pid
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking], timeout=WAIT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await ask() > 0


# Several processes.


@pytest.fixture
async def two(make_ask: Any, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Two processes, the second of which starts as soon as the first one has something to do. To
    tokenise a conversation again takes long."""
    monkeypatch.setattr(body_processes, "_START_S", 0.0)
    monkeypatch.setattr(body_processes, "_NEW_S", 1.0)
    return await make_ask(most=2, timeout_s=2 * WAIT_S)


def reader_of(ask: Ask) -> int:
    """Return which process has read the last conversation."""
    return ask.pool._processes.index(next(reversed(ask.pool._homes.values()))[0])


@asynccontextmanager
async def halted(ask: Ask, text: str) -> AsyncIterator[asyncio.Task[int]]:
    """Halt the first process while it reads a conversation."""
    os.kill(ask.pid, signal.SIGSTOP)
    asking = asyncio.create_task(ask(text))
    await asyncio.sleep(0)
    yield asking
    os.kill(ask.pid, signal.SIGCONT)
    await asking


FIRST, SECOND, THIRD = (letter * (body_processes._BEGIN_BYTES + 100) for letter in "abc")


async def test_a_turn_goes_to_the_process_that_has_its_conversation_unless_it_is_busy(
    two: Ask,
) -> None:
    await two(FIRST)
    assert reader_of(two) == 0
    async with halted(two, FIRST):
        await two(SECOND)
        assert reader_of(two) == 1
    for text, reader in ((SECOND, 1), (FIRST, 0), (SECOND, 1)):
        await two(text + "more")
        assert reader_of(two) == reader
    # A few turns that are already known take less time than to tokenise one again.
    async with halted(two, "c"):
        waiting = asyncio.create_task(two(FIRST + "more and more"))
        await two("d")
        assert not waiting.done()
    await waiting
    assert reader_of(two) == 0


async def test_the_death_of_a_process_harms_no_body_of_another(two: Ask) -> None:
    tokens = await two(FIRST)
    await two(THIRD)
    async with halted(two, FIRST) as asking:
        assert await two(SECOND) == tokens
        other = two.pool._processes[1]._child
        os.kill(two.pid, signal.SIGKILL)
        assert await two(SECOND + "more") > tokens
        assert reader_of(two) == 1
        assert await asking == tokens
        assert two.pool._processes[1]._child is other
    # The new process lacks the token ids of the one that died: any process may make them.
    async with halted(two, "d"):
        assert await two(THIRD) == tokens
        assert reader_of(two) == 1


async def test_all_processes_together_queue_a_limited_number_of_bytes(
    two: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await two(FIRST)
    monkeypatch.setattr(body_processes, "MAX_WAITING_BYTES", 2 * len(FIRST))
    async with halted(two, FIRST):
        with pytest.raises(Overloaded, match="too many large bodies"):
            await two(FIRST)
        assert await two("a") > 0
    assert await two(FIRST) == tokens


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (3, 2), (64, 4)])
def test_the_router_keeps_a_core_for_itself(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert default_processes() == processes


def test_the_process_knows_every_body_that_has_prompts() -> None:
    without_prompts = {CreateBatchRequest, LoadAdapterRequest, UnloadAdapterRequest}
    without_prompts |= {PauseBody, UpdateWeightsBody, CollectiveRpcBody}
    bodies_of_routes = {x.body for x in ROUTES if x.body is not None} - without_prompts
    assert {*body_reader.KINDS.values()} == {*bodies_of_routes, GenerateMessage}


def test_the_process_loads_neither_the_store_nor_the_routes() -> None:
    code = "import sys, router.intake.body_reader; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"sqlalchemy", "aiohttp", "router.api"} & {*loaded.stdout.split()}
