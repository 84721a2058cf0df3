"""Tiny random Llama checkpoints, generated without a download.

A plain random Llama repeats its last token for ever, whatever is in its KV cache. These models have
an untied head and strong attention. Every token of the context therefore influences the next one,
and any error in the KV cache changes the answer (tested by `tests/slow/test_kv_integrity.py`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

EOS = "<|end|>"
_TEXT = (
    "the quick brown fox jumps over the lazy dog and then it goes home to read a book about "
    "blocks of memory ; a worker has a role , a router has a pool , a token has a place . "
    "café naïve über jalapeño 漢字 かな 東京 🙂🙃 🚀 "
    '0 1 2 3 4 5 6 7 8 9 { } [ ] : " , yes no maybe '
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint's shape. The head size, 64, suits vLLM's CPU attention."""

    hidden: int = 256
    layers: int = 4
    kv_heads: int = 2
    dtype: str = "float32"
    context: int = 4096
    seed: int = 0


def make_model(directory: Path, spec: ModelSpec) -> Path:
    """Write the checkpoint into `directory`, in a child process, so that this one does not import
    torch."""
    arguments = {name: getattr(spec, name) for name in spec.__slots__}
    subprocess.run(
        [sys.executable, "-m", "tests.support.tiny_models", str(directory), json.dumps(arguments)],
        check=True,
        timeout=START_S,
    )
    return directory


def _tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    return tokenizer


def write_tokenizer(directory: Path, context: int) -> Tokenizer:
    """Write the tokenizer's files into a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return tokenizer


def _weights(spec: ModelSpec, vocab: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(spec.seed)

    def normal(rows: int, columns: int, scale: float) -> Any:
        return torch.randn(rows, columns, generator=generator) * scale

    hidden, kv, inner = spec.hidden, spec.kv_heads * 64, spec.hidden * 3
    unit = hidden**-0.5
    weights = {
        "model.embed_tokens.weight": normal(vocab, hidden, 0.5),
        "lm_head.weight": normal(vocab, hidden, unit),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": normal(hidden, hidden, 2 * unit),
            f"{at}.self_attn.k_proj.weight": normal(kv, hidden, 2 * unit),
            f"{at}.self_attn.v_proj.weight": normal(kv, hidden, 2 * unit),
            f"{at}.self_attn.o_proj.weight": normal(hidden, hidden, 2 * unit),
            f"{at}.mlp.gate_proj.weight": normal(inner, hidden, unit),
            f"{at}.mlp.up_proj.weight": normal(inner, hidden, unit),
            f"{at}.mlp.down_proj.weight": normal(hidden, inner, inner**-0.5),
            f"{at}.input_layernorm.weight": torch.ones(hidden),
            f"{at}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    dtype = getattr(torch, spec.dtype)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _write(directory: Path, spec: ModelSpec) -> None:
    from safetensors.torch import save_file

    tokenizer = write_tokenizer(directory, spec.context)
    vocab = tokenizer.get_vocab_size()
    save_file(_weights(spec, vocab), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.hidden * 3,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.hidden // 64,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": spec.context,
        "vocab_size": vocab,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))


def eagle_draft(model: Path, directory: Path) -> Path:
    """Write a random one-layer draft for a Llama (vllm/model_executor/models/llama_eagle.py). It
    mostly passes on the model's hidden state, so that some of its tokens are accepted."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    hidden = config["hidden_size"]
    weights = {f"layers.0.{name}": x for name, x in _random_layer(config).items()}
    weights["fc.weight"] = torch.cat((0.1 * torch.eye(hidden), torch.eye(hidden)), dim=1)
    whole = load_file(next(model.glob("*.safetensors")))
    weights["embed_tokens.weight"] = whole["model.embed_tokens.weight"].float()
    save_file(weights, directory / "model.safetensors")
    return directory


def with_mtp_layer(model: Path, directory: Path) -> Path:
    """Write a copy of a Llama as a MiMo, which drafts by itself: a Llama with biases (here zeros)
    and a layer for multi-token prediction (vllm/model_executor/models/mimo_mtp.py). That layer is
    random and mostly passes on the hidden state, so that some of its tokens are accepted."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    more = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config | more))
    file = next(directory.glob("*.safetensors"))
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    head = "model.mtp_layers.0."
    weights |= {head + name: x for name, x in _random_layer(config).items()}
    hidden = config["hidden_size"]
    for name in ("token", "hidden", "input", "final"):
        weights[f"{head}{name}_layernorm.weight"] = torch.ones(hidden)
    weights[f"{head}input_proj.weight"] = torch.cat(
        (torch.eye(hidden), 0.1 * torch.eye(hidden)), dim=1
    )
    for name in list(weights):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name]))
    save_file({name: x.to(torch.bfloat16) for name, x in weights.items()}, file)
    return directory


def _random_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a random Llama layer, without the norm before attention."""
    import torch

    hidden, inner, size = (config[x] for x in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{x}_heads"] * size for x in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    source = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(*shape, generator=source) * 0.05
        for name, shape in shapes.items()
    }
    weights["post_attention_layernorm.weight"] = torch.ones(hidden)
    return weights


def make_adapter(directory: Path, seed: int, *, rank: int = 8) -> Path:
    """Write a random LoRA adapter for the default model, large enough to change its answers."""
    import numpy as np
    from safetensors.numpy import save_file

    spec = ModelSpec()
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(spec.layers):
        for name, rows in (("q_proj", spec.hidden), ("v_proj", spec.kv_heads * 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a, b = rng.normal(size=(rank, spec.hidden)), rng.normal(size=(rows, rank))
            weights[f"{at}.lora_A.weight"] = (a * 0.05).astype(np.float32)
            weights[f"{at}.lora_B.weight"] = (b * 0.3).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


if __name__ == "__main__":
    from pathlib import Path

    _write(Path(sys.argv[1]), ModelSpec(**json.loads(sys.argv[2])))
