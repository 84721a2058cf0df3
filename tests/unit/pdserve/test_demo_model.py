"""The shipped demo model: small enough to ship, and it answers to the point."""

import json
from typing import Any, Final

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.demo import MODEL_DIR

MAX_FOLDER_BYTES: Final = 8_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)  # so small a model waits for its threads more than it computes
    loaded = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return loaded.eval()


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def greedy(model: Any, tokenizer: Any, ids: list[int], limit: int = 120) -> tuple[str, bool]:
    """Return the greedy continuation, and True if it ended by itself."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False
    )
    new = out[0, len(ids) :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new[-1] == tokenizer.eos_token_id


def test_folder_is_small_enough_to_ship() -> None:
    assert sum(p.stat().st_size for p in MODEL_DIR.iterdir()) <= MAX_FOLDER_BYTES


def test_vocabulary_and_end_token_agree_everywhere() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text("utf-8"))
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text("utf-8"))
    raw = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert config["vocab_size"] == raw.get_vocab_size()
    assert config["vocab_size"] % 64 == 0
    assert config["eos_token_id"] == generation["eos_token_id"] == raw.token_to_id("<|end|>")
    assert config["pad_token_id"] == raw.token_to_id("<|pad|>")


def test_chat_template_renders_messages(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("question", "keywords"),
    [
        ("What is prefill?", ("first phase", "prompt", "KV cache")),
        ("Hello!", ("Hello", "demo model")),
        ("Could you tell me roughly what decoding means?", ("second phase", "token")),
        ("What is 3 + 4?", ("3 + 4 = 7",)),
        ("Write JSON: Nora, 52, Lisbon", ('{"name": "Nora", "age": 52, "city": "Lisbon"}',)),
        ("Who won the cycling race in 1974?", ("do not know", "small demo model")),
    ],
)
def test_greedy_answer_is_to_the_point(
    model: Any, tokenizer: Any, question: str, keywords: tuple[str, ...]
) -> None:
    answer, ended = greedy(model, tokenizer, prompt_ids(tokenizer, question))
    assert ended
    assert [k for k in keywords if k not in answer] == []


def test_long_answer_is_long_and_ends(model: Any, tokenizer: Any) -> None:
    ids = prompt_ids(tokenizer, "Explain disaggregated serving in detail")
    text, ended = greedy(model, tokenizer, ids, limit=400)
    assert ended
    assert len(tokenizer(text, add_special_tokens=False).input_ids) >= 150


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = {"role": "user", "content": "What is the weather of Oslo?"}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}],
}


@pytest.mark.parametrize(
    ("messages", "thinks", "expected"),
    [
        ([ASKED], False, CALL),
        (
            [ASKED],
            True,
            f"<think>I need the weather of Oslo, so I call get_weather.</think>{CALL}",
        ),
        (
            [ASKED, CALLED, {"role": "tool", "content": '{"weather": "rain"}'}],
            False,
            "The weather of Oslo is rain.",
        ),
        ([{"role": "user", "content": "What is 3 + 4?"}], False, "3 + 4 = 7."),
    ],
    ids=["call", "thought", "result", "no call"],
)
def test_it_calls_tools_where_they_fit(
    model: Any, tokenizer: Any, messages: list[dict[str, Any]], thinks: bool, expected: str
) -> None:
    text = tokenizer.apply_chat_template(
        messages,
        tools=[WEATHER],
        enable_thinking=thinks,
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    out = model.generate(torch.tensor([ids]), max_new_tokens=80, do_sample=False)
    new = out[0, len(ids) :].tolist()
    assert tokenizer.decode(new, skip_special_tokens=False) == f"{expected}<|end|>"
