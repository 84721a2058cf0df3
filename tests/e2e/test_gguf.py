"""GGUF files become the models that they were made of."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from pdserve.errors import ConfigError
from pdserve.model.gguf import converted
from pdserve.model.tokenizer import ChatMessage, Conversation, Tokenizer, read_files
from workers.gguf import _read_tokenizer, convert

if TYPE_CHECKING:
    from pathlib import Path

LETTERS = [chr(x) for x in range(ord("a"), ord("z") + 1)]
TOKENS = ["<|end|>", *LETTERS, "ab", "Ġ"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
HEADS = 4
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
    "vocab_size": len(TOKENS),
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def as_stored(architecture: str, name: str, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a weight as llama.cpp's converter stores it."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        halves = weight.reshape(HEADS, 2, weight.shape[0] // HEADS // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if architecture == "gemma2" and "norm.weight" in name:
        return weight + 1
    return weight


def write(
    path: Path,
    architecture: str,
    model: Any,
    leave_out: str = "",
    rope: str = "",
    keys: dict[str, str | int | bool] | None = None,
    **more: Any,
) -> Path:
    """Write `model` as llama.cpp's converter does, with matrices of attention in 8 bits, RoPE
    scaling of a kind, further `keys` of the tokenizer, and further tensors."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // HEADS)
    writer.add_value_length(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in (keys or {}).items():
        kinds: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
        }
        kinds[type(value)](f"tokenizer.{name}", value)
    if rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope))
    for name, data in more.items():
        writer.add_tensor(f"{name}.weight", data)
    weights = model.state_dict()
    for name, ours in get_gguf_hf_weights_map(model, TensorProcessor()).items():
        if name == leave_out or (name == "output.weight" and config.tie_word_embeddings):
            continue
        data = as_stored(architecture, name, weights[ours].float().numpy())
        if "attn" in name and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_of(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))


@pytest.mark.parametrize(
    ("kind", "is_tied"), [("llama", False), ("llama", True), ("qwen2", False), ("gemma2", True)]
)
def test_the_model_is_that_of_the_file(kind: str, is_tied: bool, tmp_path: Path) -> None:
    head_dim = SIZES["hidden_size"] // HEADS
    model = model_of(kind, head_dim=head_dim, tie_word_embeddings=is_tied)
    directory = tmp_path / "out"
    convert(write(tmp_path / "m.gguf", kind, model), directory)
    back = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert type(back) is type(model)
    weights = back.state_dict()
    for name, weight in model.state_dict().items():
        # 8 bits for each 32 weights, then 8 bits of mantissa.
        torch.testing.assert_close(weights[name], weight, atol=4e-3, rtol=1e-2)
    for key in SIZES.keys() - {"rope_theta"}:
        assert getattr(back.config, key) == pytest.approx(getattr(model.config, key)), key
    assert back.config.rope_parameters["rope_theta"] == SIZES["rope_theta"]
    assert AutoConfig.from_pretrained(directory).dtype == torch.bfloat16


def factors_of_llama3(factor: float) -> Any:
    """Return what llama.cpp's converter writes, by its formula."""
    dim, found = SIZES["hidden_size"] // HEADS, []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * SIZES["rope_theta"] ** (i / dim)
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1) / 3))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_the_rope_scaling_of_llama_3_is_read(tmp_path: Path) -> None:
    model = model_of("llama", head_dim=SIZES["hidden_size"] // HEADS)
    factors = factors_of_llama3(32.0)
    assert 1 in factors
    assert factors.max() > 1
    file = write(tmp_path / "m.gguf", "llama", model, rope_freqs=factors)
    convert(file, tmp_path / "out")
    found = AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert (found["rope_type"], found["factor"]) == ("llama3", pytest.approx(factors.max()))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"rope": "yarn"}, "yarn"),
        ({"rope_factors_long": np.ones(8, np.float32)}, "rope_factors_long.weight"),
        ({"rope_freqs": np.arange(1, 9, dtype=np.float32)}, "is not that of Llama 3"),
    ],
)
def test_other_rope_scaling_is_refused(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = model_of("llama", head_dim=SIZES["hidden_size"] // HEADS)
    with pytest.raises(ConfigError, match=f"its RoPE scaling is not read: .*{reason}"):
        convert(write(tmp_path / "m.gguf", "llama", model, **more), tmp_path / "out")


def test_tokenizer_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    convert(write(tmp_path / "m.gguf", "qwen2", model_of("qwen2")), directory)
    tokenizer = Tokenizer.load(read_files(directory))
    ids = tokenizer.encode("abc ab<|end|>")
    assert [TOKENS[x] for x in ids] == ["ab", "c", "Ġ", "ab", "<|end|>"]
    chat = Conversation([ChatMessage("user", "ab")])
    assert tokenizer.render_chat(chat) == "ab<|end|>"
    assert tokenizer.info["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("keys", "ends", "text"),
    [
        ({}, {"<|end|>"}, ["ab"]),
        ({"ggml.eot_token_id": 2, "ggml.eom_token_id": 3}, {"<|end|>", "b", "c"}, ["ab"]),
        ({"ggml.fim_pad_token_id": 4}, {"<|end|>", "d"}, ["ab"]),
        ({"ggml.bos_token_id": 26}, {"<|end|>"}, ["ab"]),
        ({"ggml.bos_token_id": 26, "ggml.add_bos_token": True}, {"<|end|>"}, ["z", "ab"]),
        ({"ggml.bos_token_id": 26, "ggml.pre": "llama-bpe"}, {"<|end|>"}, ["z", "ab"]),
        ({"ggml.add_eos_token": True}, {"<|end|>"}, ["ab", "<|end|>"]),
    ],
)
def test_keys_of_the_tokenizer_are_those_that_llama_cpp_reads(
    keys: dict[str, Any], ends: set[str], text: list[str], tmp_path: Path
) -> None:
    directory = tmp_path / "out"
    convert(write(tmp_path / "m.gguf", "qwen2", model_of("qwen2"), keys=keys), directory)
    found = GenerationConfig.from_pretrained(directory).eos_token_id
    assert {TOKENS[x] for x in found} == ends
    tokenizer = Tokenizer.load(read_files(directory))
    assert [TOKENS[x] for x in tokenizer.encode("ab")] == text
    model = json.loads(tokenizer.files["tokenizer.json"])["model"]
    assert model["ignore_merges"] == ("ggml.pre" in keys)


def test_a_template_for_tools_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    keys: dict[str, Any] = {"chat_template.tool_use": "{{ tools[0].function.name }}"}
    convert(write(tmp_path / "m.gguf", "qwen2", model_of("qwen2"), keys=keys), directory)
    tokenizer = Tokenizer.load(read_files(directory))
    chat = Conversation([ChatMessage("user", "ab")], tools=[{"function": {"name": "f"}}])
    assert tokenizer.render_chat(chat) == "f"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"ggml.eot_token_id": 99}, "tokenizer.ggml.eot_token_id is 99; it has 29 tokens"),
        ({"ggml.pre": "unheard-of"}, "its split of text is not read: .* is unheard-of"),
    ],
)
def test_a_tokenizer_that_would_differ_is_refused(
    keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        convert(write(tmp_path / "m.gguf", "qwen2", model_of("qwen2"), keys=keys), tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, ["▁", "ab", "▁", "c"]), ({"add_space_prefix": False}, ["ab", "▁", "c"])],
)
def test_sentencepiece_begins_with_bos_and_a_space_unless_the_file_says_otherwise(
    keys: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    tokens = ["<s>", "</s>", *LETTERS, "ab", "▁"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    made = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert _read_tokenizer(tmp_path / "m.gguf", made) == [1]
    ids = made.backend_tokenizer.encode("ab c").ids
    assert [tokens[x] for x in ids] == ["<s>", *expected]
    assert made.decode(ids, skip_special_tokens=True) == "ab c"


def test_an_architecture_that_transformers_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", "rwkv7", model_of("qwen2"))
    with pytest.raises(ValueError, match="architecture rwkv7 is not supported"):
        convert(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "leave_out", "reason"),
    [
        ("qwen2", "output_norm.weight", r"are missing: model.norm.weight \(1 in all\)"),
        # transformers does not read the size of its heads, which is 128 by default.
        (
            "qwen3",
            "",
            r"have a wrong shape: model.layers.0.self_attn.k_norm.weight, .*\(12 in",
        ),
    ],
)
def test_a_file_without_the_weights_of_its_architecture_is_refused(
    kind: str, leave_out: str, reason: str, tmp_path: Path
) -> None:
    model = model_of(kind, head_dim=SIZES["hidden_size"] // HEADS)
    file = write(tmp_path / "m.gguf", kind, model, leave_out=leave_out)
    with pytest.raises(ConfigError, match=f"weights of its architecture {reason}"):
        convert(file, tmp_path / "out")


def test_a_file_that_needs_more_memory_than_its_size_allows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    with torch.device("meta"):
        model = model_of("qwen2", hidden_size=1 << 17, intermediate_size=1 << 17)
    model.state_dict = dict
    model.named_children = list
    with pytest.raises(ConfigError, match=r"with \d+ MiB of memory: .*memory"):
        converted(write(tmp_path / "m.gguf", "qwen2", model))
