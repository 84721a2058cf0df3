"""Making requests of what clients ask for, with the tokenizer and the defaults of the model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripted import MAX_MODEL_LEN

from pdserve.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.tokenizer import ChatMessage, Conversation, Tokenizer, read_files
from pdserve.types import ModelInfo, SamplingParams
from router.api.preprocess import (
    INLINE_CHARS,
    OPEN_ENDED,
    ParsedRequest,
    Preprocessor,
)
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from router.api.preprocess import Prompt


def model(name: str, directory: Path, max_model_len: int = MAX_MODEL_LEN) -> ModelInfo:
    return ModelInfo(name, str(directory), max_model_len, 300, "float32")


def ask(prompt: Prompt, name: str = "") -> ParsedRequest:
    return ParsedRequest(name, prompt, SamplingParams(max_tokens=1), "r")


async def read(info: ModelInfo) -> Tokenizer:
    return Tokenizer.load(read_files(Path(info.path)))


async def nothing(info: ModelInfo) -> Tokenizer:
    raise Unavailable(f"no tokenizer of {info.name}")


class Loads:
    """A loader that counts, fails as often as told, and waits until it may go on."""

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
    intake = Preprocessor(lambda: {"a": model("a", model_dir)}, timeout_s=WAIT_S, load=loads)
    tasks = [asyncio.create_task(intake.prepare(ask("hi"))) for _ in range(3)]
    await asyncio.sleep(0)
    # The one that started the loading goes away; the others still get it.
    tasks[0].cancel()
    loads.may_go_on.set()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    again = await intake.prepare(ask("hi"))
    assert {x.prompt_token_ids for x in others} == {again.prompt_token_ids}  # type: ignore[union-attr]
    assert loads.count == 1


async def test_another_digest_is_another_tokenizer(model_dir: Path) -> None:
    loads, models = Loads(), {"a": replace(model("a", model_dir), tokenizer="one")}
    loads.may_go_on.set()
    intake = Preprocessor(lambda: models, timeout_s=WAIT_S, load=loads)
    await intake.prepare(ask("hi"))
    models["a"] = replace(models["a"], tokenizer="other")
    await intake.prepare(ask("hi"))
    assert (loads.count, [*intake._tokenizers]) == (2, ["other"])


async def test_tokenizer_that_could_not_be_loaded_is_tried_again(model_dir: Path) -> None:
    loads = Loads(failures=1)
    loads.may_go_on.set()
    intake = Preprocessor(lambda: {"a": model("a", model_dir)}, timeout_s=WAIT_S, load=loads)
    with pytest.raises(Unavailable, match="no tokenizer of model a; send token ids"):
        await intake.prepare(ask("hi"))
    assert (await intake.prepare(ask("hi"))).prompt_token_ids


async def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    infos = {"a": model("a", tmp_path)}
    intake = Preprocessor(lambda: infos, timeout_s=WAIT_S, load=nothing)
    assert (await intake.prepare(ask((1, 2)))).prompt_token_ids == (1, 2)
    with pytest.raises(Unavailable):
        await intake.prepare(ask("hi"))


async def test_without_a_name_the_only_model_is_meant(model_dir: Path) -> None:
    models = {"a": model("a", model_dir)}
    intake = Preprocessor(lambda: models, timeout_s=WAIT_S, load=read)
    assert (await intake.prepare(ask((1,)))).model == "a"
    models["b"] = model("b", model_dir)
    with pytest.raises(InvalidRequest, match="a, b") as caught:
        await intake.prepare(ask((1,)))
    assert caught.value.field == "model"
    assert (await intake.prepare(ask((1,), "b"))).model == "b"


@pytest.mark.parametrize("length", [1, INLINE_CHARS + 1])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_only_long_prompts_are_tokenised_in_a_thread(
    model_dir: Path, length: int, is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    info = model("a", model_dir, max_model_len=10 * INLINE_CHARS)
    intake = Preprocessor(lambda: {"a": info}, timeout_s=WAIT_S, load=read)
    text = "a" * length
    prompt = Conversation([ChatMessage("user", text)]) if is_chat else text
    await intake.prepare(ask(prompt))
    assert (threads == [threading.get_ident()]) == (length <= INLINE_CHARS)


async def test_sampling_parameters_that_are_not_given_are_the_models(model_dir: Path) -> None:
    defaults = {"temperature": 0.6, "top_k": 20.0, "max_tokens": 9.0}
    served = replace(model("a", model_dir), aliases=("b",), sampling_defaults=defaults)
    intake = Preprocessor(lambda: {"a": served}, timeout_s=WAIT_S, load=read)
    given = SamplingParams(max_tokens=OPEN_ENDED, temperature=1.0)
    parsed = ParsedRequest("b", (1, 2), given, "r", given={"temperature"})
    made = await intake.prepare(parsed)
    assert made.model == "a"
    assert made.sampling == SamplingParams(max_tokens=9, temperature=1.0, top_k=20)
    parsed.given, given.max_tokens = (), 12
    made = await intake.prepare(parsed)
    assert made.sampling == SamplingParams(max_tokens=12, temperature=0.6, top_k=20)
