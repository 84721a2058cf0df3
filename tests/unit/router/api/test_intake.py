"""Making requests of what clients ask for, with the tokenizer and the defaults of the model."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve.config import ModelRuleConfig, SloConfig, VirtualModelConfig
from pdserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Unavailable
from pdserve.model.tokenizer import ChatMessage, Conversation, Tokenizer, read_files
from pdserve.types import ModelInfo, SamplingParams
from router.dialects.openai import CompletionRequest
from router.dialects.parsed_request import OPEN_ENDED, ParsedRequest
from router.intake.answer_length import MAX_ANSWER_TOKENS, MAX_PROMPT_LOGPROBS
from router.intake.body_processes import BodyProcesses
from router.intake.executors import INLINE_BYTES
from router.intake.intake import Origin
from router.metrics import RouterMetrics
from tests.support.router_apis import MAX_MODEL_LEN, make_intake, prepare
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from router.dialects.parsed_request import Prompt

CONTEXT = 1 << 20


def model(name: str, directory: Path, max_model_len: int = MAX_MODEL_LEN) -> ModelInfo:
    return ModelInfo(name, str(directory), max_model_len, 300, "float32")


def ask(prompt: Prompt, name: str = "") -> ParsedRequest:
    return ParsedRequest(name, prompt, SamplingParams(max_tokens=1))


async def read(info: ModelInfo) -> Tokenizer:
    return Tokenizer.load(read_files(Path(info.path)))


async def nothing(info: ModelInfo) -> Tokenizer:
    raise Unavailable(f"no tokenizer of {info.name}")


class Loads:
    """A loader that counts, fails `failures` times, and waits for `may_go_on`."""

    def __init__(self, *, failures: int = 0) -> None:
        self.count = 0
        self.failures = failures
        self.may_go_on = asyncio.Event()

    async def __call__(self, info: ModelInfo) -> Tokenizer:
        self.count += 1
        await asyncio.wait_for(self.may_go_on.wait(), WAIT_S)
        if self.count <= self.failures:
            raise ConfigError("it is not there", field="model")
        return await read(info)


async def test_requests_that_come_while_a_tokenizer_is_loaded_share_it(model_dir: Path) -> None:
    loads = Loads()
    intake = make_intake(lambda: {"a": model("a", model_dir)}, loads)
    tasks = [asyncio.create_task(prepare(intake, ask("hi"))) for _ in range(3)]
    await asyncio.sleep(0)
    # The one that started the loading goes away; the others still get it.
    tasks[0].cancel()
    loads.may_go_on.set()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    again = await prepare(intake, ask("hi"))
    assert {x.prompt_token_ids for x in others} == {again.prompt_token_ids}  # type: ignore[union-attr]
    assert loads.count == 1


async def test_another_digest_is_another_tokenizer(model_dir: Path) -> None:
    loads, models = Loads(), {"a": replace(model("a", model_dir), tokenizer="one")}
    loads.may_go_on.set()
    intake = make_intake(lambda: models, loads)
    await prepare(intake, ask("hi"))
    models["a"] = replace(models["a"], tokenizer="other")
    await prepare(intake, ask("hi"))
    assert (loads.count, [*intake._tokenizers._tasks]) == (2, ["other"])


async def test_tokenizer_that_could_not_be_loaded_is_tried_again(model_dir: Path) -> None:
    loads = Loads(failures=1)
    loads.may_go_on.set()
    intake = make_intake(lambda: {"a": model("a", model_dir)}, loads)
    with pytest.raises(Unavailable, match="no tokenizer of model a; send token ids"):
        await prepare(intake, ask("hi"))
    assert (await prepare(intake, ask("hi"))).prompt_token_ids


async def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    infos = {"a": model("a", tmp_path)}
    intake = make_intake(lambda: infos, nothing)
    assert (await prepare(intake, ask((1, 2)))).prompt_token_ids == (1, 2)
    with pytest.raises(Unavailable):
        await prepare(intake, ask("hi"))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *((x, True) for x in (f"00-{'a' * 32}-{'b' * 16}-01", f"01-{'a' * 32}-{'b' * 16}-01-new")),
        *((x, False) for x in ("", "\udcff", f"00-{'a' * 32}-{'b' * 16}-01-\udcff", "a" * 8192)),
    ],
)
async def test_only_a_valid_traceparent_goes_to_workers(
    model_dir: Path, given: str, kept: bool
) -> None:
    intake = make_intake(lambda: {"a": model("a", model_dir)}, Loads())
    made = await prepare(intake, ask((1,)), traceparent=given)
    assert made.traceparent == (given if kept else "")


async def test_without_a_name_the_only_model_is_meant(model_dir: Path) -> None:
    models = {"a": model("a", model_dir)}
    intake = make_intake(lambda: models, read)
    assert (await prepare(intake, ask((1,)))).model == "a"
    models["b"] = model("b", model_dir)
    with pytest.raises(InvalidRequest, match="a, b") as caught:
        await prepare(intake, ask((1,)))
    assert caught.value.field == "model"
    assert (await prepare(intake, ask((1,), "b"))).model == "b"


@pytest.mark.parametrize("length", [1, INLINE_BYTES + 1])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_only_long_prompts_are_tokenised_in_a_thread(
    model_dir: Path, length: int, is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, **options: Any) -> tuple[int, ...]:
        threads.append(threading.get_ident())
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    info = model("a", model_dir, max_model_len=10 * INLINE_BYTES)
    intake = make_intake(lambda: {"a": info}, read)
    text = "a" * length
    prompt = Conversation([ChatMessage("user", text)]) if is_chat else text
    await prepare(intake, ask(prompt), text.encode())
    assert (threads == [threading.get_ident()]) == (length <= INLINE_BYTES)


async def test_sampling_parameters_that_are_not_given_are_the_models(model_dir: Path) -> None:
    defaults = {"temperature": 0.6, "top_k": 20.0, "max_tokens": 9.0}
    served = replace(model("a", model_dir), aliases=("b",), sampling_defaults=defaults)
    intake = make_intake(lambda: {"a": served}, read)
    given = SamplingParams(max_tokens=OPEN_ENDED, temperature=1.0)
    parsed = ParsedRequest("b", (1, 2), given, given={"temperature"})
    made = await prepare(intake, parsed)
    assert made.model == "a"
    assert made.sampling == SamplingParams(max_tokens=9, temperature=1.0, top_k=20)
    given = replace(given, max_tokens=12)
    made = await prepare(intake, structs.replace(parsed, sampling=given, given=()))
    assert made.sampling == SamplingParams(max_tokens=12, temperature=0.6, top_k=20)


def says(content: str, **more: Any) -> Conversation:
    return Conversation([ChatMessage("user", content, **more)])


LONG = "a" * (13 * MAX_MODEL_LEN)  # the longest token of the test's model has 13 characters
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": LONG}}}


@pytest.mark.parametrize(
    "prompt",
    [
        f"{LONG}a",
        says(f"{LONG}a"),
        says("a", name=LONG),
        says("a", reasoning=LONG),
        says("a", tool_calls=[CALL]),
        Conversation([ChatMessage("user", "a")], variables={"style": LONG}),
        Conversation([ChatMessage("user", "a")], tools=[CALL]),
    ],
    ids=["text", "content", "name", "reasoning", "tool-arguments", "variables", "tools"],
)
async def test_prompt_that_cannot_fit_is_refused_before_it_is_rendered(
    model_dir: Path, prompt: str | Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = make_intake(lambda: {"a": model("a", model_dir)}, read)
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "render_chat", None)
    limit = f"context is {MAX_MODEL_LEN} tokens, which are at most {len(LONG)} characters"
    with pytest.raises(ContextLengthExceeded, match=rf"'prompt' has \d+ characters.*{limit}"):
        await prepare(intake, ask(prompt))


async def test_prompt_of_the_longest_tokens_is_tokenised(model_dir: Path) -> None:
    intake = make_intake(lambda: {"a": model("a", model_dir)}, read)
    made = await prepare(intake, ask("<|assistant|>" * (MAX_MODEL_LEN - 1)))
    assert len(made.prompt_token_ids) == MAX_MODEL_LEN - 1


@pytest.mark.parametrize(
    ("sampling", "prompts", "most"),
    [
        (SamplingParams(), 1, CONTEXT - 2),
        (SamplingParams(n=2), 1, MAX_ANSWER_TOKENS // 2),
        (SamplingParams(), 3, MAX_ANSWER_TOKENS // 3),
        (SamplingParams(logprobs=3), 1, MAX_ANSWER_TOKENS // 4),
        (SamplingParams(n=3, logprobs=4), 1, MAX_ANSWER_TOKENS // 15),
    ],
    ids=["one", "n", "prompts", "logprobs", "all"],
)
async def test_tokens_of_all_answers_with_their_logprobs_are_limited(
    model_dir: Path,
    sampling: SamplingParams,
    prompts: int,
    most: int,
) -> None:
    info = model("a", model_dir, CONTEXT)
    intake = make_intake(lambda: {"a": info}, read)
    parsed = structs.replace(ask((1, 2)), prompts=prompts)
    if most != CONTEXT - 2:
        long = structs.replace(parsed, sampling=replace(sampling, max_tokens=most + 1))
        with pytest.raises(InvalidRequest, match=f"it may be {most}") as caught:
            await prepare(intake, long)
        assert caught.value.field == "max_tokens"
    # Without a length given, the answer gets what is allowed.
    for max_tokens in (most, OPEN_ENDED):
        one = structs.replace(parsed, sampling=replace(sampling, max_tokens=max_tokens))
        assert (await prepare(intake, one)).sampling.max_tokens == most


async def test_a_prompt_too_long_to_be_scored_is_refused(model_dir: Path) -> None:
    info, most = model("a", model_dir, CONTEXT), MAX_PROMPT_LOGPROBS // 3
    intake = make_intake(lambda: {"a": info}, read)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=2)
    await prepare(intake, structs.replace(ask((1,) * most), sampling=sampling))
    with pytest.raises(InvalidRequest, match=f"it may have {most}") as caught:
        await prepare(intake, structs.replace(ask((1,) * (most + 1)), sampling=sampling))
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("large_body", [False, True])
async def test_a_virtual_model_reads_a_prompt_for_the_first_model_that_can_and_for_others_again(
    model_dir: Path, *, large_body: bool
) -> None:
    small, large = model("small", model_dir, 8), model("large", model_dir, CONTEXT)
    virtual = VirtualModelConfig(
        name="auto", default="small", rules=(ModelRuleConfig(name="r", model="large"),)
    )
    models = {"small": small, "large": large}
    processes = BodyProcesses(RouterMetrics(SloConfig()), larger_than=64) if large_body else None
    try:
        intake = make_intake(
            lambda: models, read, processes=processes, virtual_models={"auto": virtual}
        )
        padding = " " * 100 if large_body else ""
        short = await intake.read(
            CompletionRequest, f'{{"model": "auto", "prompt": "hi"}}{padding}'.encode(), ""
        )
        assert (short.model, short.parsed[0].model) == (small, "small")
        other = await intake.read_for(short, "large", Origin("r", ""))
        assert (other.model, other.parsed[0].model) == (large, "large")
        assert [*other.prompts[0]] == [*short.prompts[0]]
        (made,) = await intake.prepare(other, Origin("r", ""))
        assert (made.model, len(made.prompt_token_ids)) == ("large", 2)
        body = {"model": "auto", "prompt": "x" * 4000}
        long = await intake.read(CompletionRequest, json.dumps(body).encode(), "")
        assert long.model == large
        # Ids of tokens are recognised, also if a child process has removed them.
        body = {"model": "auto", "prompt": [1] * 40}
        ids = await intake.read(CompletionRequest, json.dumps(body).encode(), "")
        assert isinstance(ids.parsed[0].prompt, tuple)
        intake.close()
    finally:
        if processes is not None:
            await processes.close()
