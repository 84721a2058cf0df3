"""kv_transfer without the rest of pdserve: two plain `vllm serve` and a proxy over HTTP. The
answers are those of one engine, in float32."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from pdserve.types import SamplingParams
from tests.support.engine_pair import prompt
from tests.support.timeouts import WAIT_S
from tests.support.vllm_serve import ServerProcess, example_proxy, vllm_serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATH = "/v1/completions"
_SEEDS = itertools.count(5000)
LETTER = 40  # its token in the tiny models' vocabulary
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 1234, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    "min_tokens and stop ids": {
        "temperature": 0.0,
        "min_tokens": 5,
        "stop_token_ids": list(range(3, 200)),
    },
}


class Pair:
    """Two independent servers."""

    def __init__(self, prefill: ServerProcess, decode: ServerProcess) -> None:
        self.prefill, self.decode = prefill, decode

    async def moved_tokens(self) -> float:
        """Return the number of prompt tokens whose KV decode has received."""
        source = "external_kv_transfer"
        return await self.decode.metric("vllm:prompt_tokens_by_source_total", source=source)

    async def until_empty(self) -> None:
        """Wait until neither server has a used block or an open request."""
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        alive = [x for x in (self.prefill, self.decode) if x.process.poll() is None]
        wanted = [(served, name) for served in alive for name in names]
        async with asyncio.timeout(WAIT_S):
            while wanted:
                served, name = wanted[-1]
                if await served.metric(f"vllm:{name}") == 0.0:
                    wanted.pop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    directory = tmp_path_factory.mktemp("serve")
    both: list[ServerProcess] = []
    try:
        # Its engine's process is a fork, and does not import vLLM again.
        forks = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        both += [vllm_serve(tiny_model, directory, "prefill", {"hold_s": 2 * WAIT_S}, env=forks)]
        # One of vLLM's processes less than by default: the engine runs the model itself.
        in_engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        both += [vllm_serve(tiny_model, directory, "decode", {}, env=in_engine)]
        for served in both:
            await served.until_ready()
        yield Pair(*both)
    finally:
        left = [process for served in both for process in served.close()]
    assert left == []


@pytest_asyncio.fixture(loop_scope="session")
async def pair(servers: Pair) -> AsyncIterator[Pair]:
    """Assert that every test leaves both servers empty."""
    yield servers
    await servers.until_empty()


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[(), ("--at-once",)], ids=["in turn", "at once"]
)
async def proxy(
    servers: Pair, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("proxy")
    served = example_proxy(servers.prefill, servers.decode, directory, *request.param)
    try:
        await served.until_ready()
        yield served
    finally:
        served.close()


def fresh(length: int) -> list[int]:
    """Return a prompt that no server has cached, so that all of its KV is transferred. It ends with
    a letter: after a part of a character, vLLM's own server repeats the prompt in the answer."""
    return [*prompt(length - 1, next(_SEEDS)), LETTER]


def asked(ids: list[int], kind: str, **more: Any) -> dict[str, Any]:
    fields = {"max_tokens": 24, **KINDS[kind], **more}
    return {"model": "tiny", "prompt": ids, "return_token_ids": True, **fields}


async def expected(engine: EngineProcess, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of one engine in the form of OpenAI's API."""
    names = SamplingParams.__dataclass_fields__
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items() if k in names}
    whole = await engine.run(body["prompt"], SamplingParams(**fields))
    return {
        "token_ids": list(whole.token_ids),
        "text": whole.text,
        "finish_reason": str(whole.finish_reason),
    }


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an answer that must be exact."""
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    return {name: choice[name] for name in ("token_ids", "text", "finish_reason")}


async def run_prefill(pair: Pair, body: dict[str, Any]) -> dict[str, Any]:
    """Return the transfer parameters in prefill's answer, for decode."""
    short = {k: v for k, v in body.items() if k != "min_tokens"}
    kv: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    status, first = await pair.prefill.post(
        PATH, {**short, "max_tokens": 1, "kv_transfer_params": {**kv, **nothing}}
    )
    assert status == 200
    found: dict[str, Any] = first["kv_transfer_params"]
    return found


@pytest.mark.parametrize(
    ("kind", "length"), [*((kind, 33) for kind in KINDS), ("greedy", 2), ("seeded", 700)]
)
async def test_two_requests_by_hand_are_exact(
    pair: Pair, aggregated: EngineProcess, kind: str, length: int
) -> None:
    """This is how proxies for vLLM's own connectors work."""
    body = asked(fresh(length), kind)
    moved = await pair.moved_tokens()
    kv = await run_prefill(pair, body)
    status, answer = await pair.decode.post(PATH, {**body, "kv_transfer_params": kv})
    assert status == 200
    assert told(answer) == await expected(aggregated, body)
    assert await pair.moved_tokens() == moved + length


async def test_both_of_two_answers_are_exact(pair: Pair, aggregated: EngineProcess) -> None:
    """vLLM splits n = 2 into two requests, with one transfer."""
    body = asked(fresh(300), "seeded")
    kv = await run_prefill(pair, body)
    _, answer = await pair.decode.post(PATH, {**body, "n": 2, "kv_transfer_params": kv})
    wanted = [await expected(aggregated, {**body, "seed": 1234 + i}) for i in (0, 1)]
    found = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in found] == [w["token_ids"] for w in wanted]


async def test_a_first_token_that_is_handed_over_is_exact(
    pair: Pair, aggregated: EngineProcess
) -> None:
    """A proxy can join the token streams itself."""
    other = asked(fresh(40), "greedy")
    kv = await run_prefill(pair, other)
    await pair.decode.post(PATH, {**other, "kv_transfer_params": kv})
    body = asked(fresh(400), "seeded")
    source = {"role": "producer", "transfer_id": "by hand"}
    target = {"role": "consumer", "transfer_id": "by hand"}
    target |= {name: kv[name] for name in ("producer_addresses", "producer_instance_id")}
    first, rest = await asyncio.gather(
        pair.prefill.post(PATH, {**body, "max_tokens": 1, "kv_transfer_params": source}),
        pair.decode.post(PATH, {**body, "kv_transfer_params": target}),
    )
    tokens = [answer["choices"][0]["token_ids"] for _, answer in (first, rest)]
    assert len(tokens[0]) == 1
    assert [*tokens[0], *tokens[1]] == (await expected(aggregated, body))["token_ids"]


async def test_the_proxy_answers_as_one_engine(
    pair: Pair, proxy: ServerProcess, aggregated: EngineProcess
) -> None:
    bodies = [asked(fresh(40 + 97 * i), list(KINDS)[i % len(KINDS)]) for i in range(8)]
    wanted = [await expected(aggregated, body) for body in bodies]
    moved = await pair.moved_tokens()
    _, first = await proxy.post(PATH, bodies[0])
    rest = await asyncio.gather(*(proxy.post(PATH, body) for body in bodies[1:]))
    assert [told(answer) for answer in (first, *(answer for _, answer in rest))] == wanted
    lengths = sum(len(body["prompt"]) for body in bodies)
    assert await pair.moved_tokens() == moved + lengths


async def test_the_proxy_streams(
    pair: Pair, proxy: ServerProcess, aggregated: EngineProcess
) -> None:
    body = asked(fresh(333), "seeded")
    text, pieces = "", 0
    async with (
        aiohttp.ClientSession() as client,
        client.post(proxy.url + PATH, json={**body, "stream": True}) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                pieces += 1
    assert text == (await expected(aggregated, body))["text"]
    assert pieces > 3


@pytest.mark.parametrize("kv", [{"do_remote_prefill": True}, {"role": "junk"}])
async def test_an_unreadable_answer_fails_alone(
    pair: Pair, aggregated: EngineProcess, kv: dict[str, Any]
) -> None:
    body = asked(fresh(50), "greedy")
    good = asyncio.create_task(pair.decode.post(PATH, body))
    status, _ = await pair.decode.post(PATH, {**body, "kv_transfer_params": kv})
    assert status == 500
    assert told((await good)[1]) == await expected(aggregated, body)
    assert "kv_transfer_params" in pair.decode.log


async def test_the_kv_of_another_prompt_is_refused(pair: Pair) -> None:
    mine, other = (asked(fresh(64), "greedy") for _ in range(2))
    kv = await run_prefill(pair, mine)
    status, _ = await pair.decode.post(PATH, {**other, "kv_transfer_params": kv})
    assert status == 500
    assert "prompt_digest is that of another prompt" in pair.decode.log
    status, _ = await pair.decode.post(PATH, {**mine, "kv_transfer_params": kv})
    assert status == 200


async def test_a_dead_prefill_server_costs_no_answer(
    pair: Pair, tmp_path: Path, aggregated: EngineProcess
) -> None:
    """Last in this file. The proxy still considers the server alive and tells decode to fetch from
    it."""
    served = example_proxy(pair.prefill, pair.decode, tmp_path, "--at-once")
    try:
        await served.until_ready()
        bodies = [asked(fresh(90), "seeded") for i in range(3)]
        wanted = [await expected(aggregated, body) for body in bodies]
        answers = [await served.post(PATH, bodies[0])]
        pair.prefill.kill()
        answers += [await served.post(PATH, body) for body in bodies[1:]]
        assert [told(answer) for _, answer in answers] == wanted
    finally:
        served.close()
