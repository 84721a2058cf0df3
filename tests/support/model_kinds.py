"""Tiny random models, one for each kind of KV cache and architecture that vLLM serves.

They are made from `transformers` configs. Their weights are larger than those of an initialiser, so
that every token of the context influences the next one.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.support.processes import start_python
from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, WINDOW, CONTEXT = 4, 128, 4, 2, 32, 72, 2048
_PLAIN: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
_ONE_FULL_IN_TWO = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model.

    `config`: its `transformers` config class. `cache`: the parts of its KV cache. `more`: additions
    to _PLAIN and overrides. `scale`: factor of matrices relative to 1/sqrt(inputs). `limits`:
    limits of vLLM's CPU build, which `engine_args` and `skips` work around. `processor`: for a
    multimodal model, the classes of its processor and of the processor's parts; _PLAIN and `more`
    then describe its language model.
    """

    config: str
    cache: str
    more: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.6
    limits: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    skips: tuple[str, ...] = ()
    processor: tuple[str, ...] = ()

    @property
    def image_mark(self) -> str:
        """The placeholder of an image in a text; empty if the model takes none."""
        if not self.processor:
            return ""
        family = self.processor[0].removesuffix("Processor")
        return {
            "Gemma3": "<start_of_image>",
            "Llava": "<image>",
        }.get(family, "<|vision_start|><|image_pad|><|vision_end|>")


FULL, WINDOWS, STATES = "full attention", "full attention and windows", "full attention and states"
KINDS = {
    "Llama": Kind("LlamaConfig", FULL),
    "Qwen2": Kind("Qwen2Config", FULL),
    "Qwen3": Kind("Qwen3Config", FULL),
    "Qwen3-MoE": Kind("Qwen3MoeConfig", FULL, {**_MOE, "num_experts": 4}),
    "Mixtral": Kind("MixtralConfig", FULL, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Phi-3": Kind("Phi3Config", FULL, {"original_max_position_embeddings": CONTEXT}),
    "Granite": Kind("GraniteConfig", FULL),
    "OLMo-2": Kind("Olmo2Config", FULL),
    "GPT-2": Kind(
        "GPT2Config",
        FULL,
        {"n_positions": CONTEXT, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "DeepSeek-V2": Kind(
        "DeepseekV2Config",
        "MLA",
        {
            **_MOE,
            "num_key_value_heads": HEADS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 32,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "Gemma-2": Kind(
        "Gemma2Config",
        WINDOWS,
        {
            **_ONE_FULL_IN_TWO,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3": Kind(
        "Gemma3TextConfig",
        WINDOWS,
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3n": Kind(
        "Gemma3nTextConfig",
        "full attention and windows, shared by layers",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            # In vLLM these layers share the KV of the last two layers with KV of their own.
            "layer_types": [
                *["sliding_attention"] * 3,
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "sliding_window": WINDOW,
            "intermediate_size": [2 * HIDDEN] * 6,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * 6,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": Kind(
        "GptOssConfig",
        "full attention and windows, with sinks",
        {
            **_ONE_FULL_IN_TWO,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "Mistral": Kind("MistralConfig", "windows alone", {"sliding_window": WINDOW}),
    "Granite-hybrid": Kind(
        "GraniteMoeHybridConfig",
        f"{STATES} (Mamba-2)",
        {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 2 * HIDDEN,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_expand": 2,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
        },
        limits="no prefix caching",
    ),
    "Qwen3-Next": Kind(
        "Qwen3NextConfig",
        f"{STATES} (gated delta net)",
        {
            **_MOE,
            "num_experts": 4,
            "shared_expert_intermediate_size": HIDDEN,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        limits="bfloat16 only, in which tokens computed again are rounded otherwise",
        skips=("resumed",),
        engine_args={"dtype": "bfloat16"},
    ),
    "Llama-4": Kind(
        "Llama4TextConfig",
        "full attention and local chunks",
        {
            "intermediate_size_mlp": 2 * HIDDEN,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 128,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        },
    ),
    "GLM-4.5": Kind(
        "Glm4MoeConfig",
        FULL,
        {
            **_MOE,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "Falcon-H1": Kind(
        "FalconH1Config",
        f"{STATES} (Mamba-2), in one layer",
        {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
        },
        limits="no prefix caching",
    ),
    "Nemotron-H": Kind(
        "NemotronHConfig",
        f"{STATES} (Mamba-2)",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 32,
            "expand": 2,
        },
        scale=2.5,
        limits="no prefix caching",
    ),
    "Qwen2.5-VL": Kind(
        "Qwen2_5_VLConfig",
        FULL,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            }
        },
        processor=("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    ),
}
KINDS["LLaVA"] = Kind(
    "LlavaConfig", FULL, processor=("LlavaProcessor", "CLIPImageProcessor"), scale=2.0
)
KINDS["Gemma-3, multimodal"] = replace(
    KINDS["Gemma-3"],
    config="Gemma3Config",
    processor=("Gemma3Processor", "Gemma3ImageProcessor"),
)
KINDS["Qwen3.5"] = replace(
    KINDS["Qwen3-Next"],
    config="Qwen3_5Config",
    more={
        **{
            k: v for k, v in KINDS["Qwen3-Next"].more.items() if "expert" not in k and k not in _MOE
        },
        "rope_parameters": {
            **KINDS["Qwen3-Next"].more["rope_parameters"],
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    processor=("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
)


# The union of the keys that the models of KINDS read.
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 14,
    "image_size": 56,
}
# Words missing in the tokenizer, by their names in its configuration.
_QWEN_WORDS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_IMAGE_TOKENS = 16  # of one image, for Gemma and LLaVA
_GEMMA_WORDS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    **{f"lines_{n}": "\n" * n for n in range(1, 5)},
}
_LLAVA_WORDS = {"image_token": "<image>"}


async def make_kind(directory: Path, name: str) -> Path:
    """Write the checkpoint into `directory`, in a fork of a process that has imported torch."""
    child = await start_python("tests.support.model_kinds", str(directory), name)
    code = await asyncio.wait_for(child.wait(), START_S)
    assert code == 0, f"the process that makes {name} exited with {code}"
    return directory


def _write_processor(directory: Path, processor: str, *parts: str) -> dict[str, Any]:
    """Write the processor's files to the tokenizer's directory. Return the entries on its words for
    the model's configuration."""
    import transformers

    words = {"Gemma3Processor": _GEMMA_WORDS, "LlavaProcessor": _LLAVA_WORDS}.get(
        processor, _QWEN_WORDS
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words.values())})
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": words}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    first, *others = [getattr(transformers, part)() for part in parts]
    side, more = _VISION["image_size"], {}
    if words is not _QWEN_WORDS:
        first.size = {"height": side, "width": side}
    if words is _GEMMA_WORDS:
        more = {"image_seq_length": _IMAGE_TOKENS}
    elif words is _LLAVA_WORDS:
        first.crop_size = first.size
        # CLIP adds a class token, which the default strategy drops.
        more = {
            "patch_size": _VISION["patch_size"],
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
    whole = getattr(transformers, processor)(first, tokenizer, *others, **more)
    whole.save_pretrained(directory)
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
    if words is _GEMMA_WORDS:
        names = ("image_token", "boi_token", "eoi_token")
        return {
            "mm_tokens_per_image": _IMAGE_TOKENS,
            **{f"{name}_index": ids[name] for name in names},
        }
    if words is _LLAVA_WORDS:
        return {"image_seq_length": _IMAGE_TOKENS, "image_token_index": ids["image_token"]}
    return {f"{name}_id": number for name, number in ids.items()}


def _write(directory: Path, name: str) -> None:
    import torch
    import transformers

    from tests.support.tiny_models import write_tokenizer

    kind = KINDS[name]
    torch.manual_seed(0)
    text, make_config = _PLAIN | kind.more, getattr(transformers, kind.config)
    dtype = getattr(torch, kind.engine_args.get("dtype", "float32"))
    write_tokenizer(directory, CONTEXT)
    if kind.processor:
        marks = _write_processor(directory, *kind.processor)
        tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
        config = make_config(text_config=text, vision_config=_VISION, **marks, **tied)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    else:
        config = make_config(**text)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Small if the tables are tied, so that a token does not just repeat itself.
    table = 0.03 if config.tie_word_embeddings else 0.8
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv" not in parameter_name:
                is_table = "embed" in parameter_name or ".wte" in parameter_name
                scale = table if is_table else kind.scale * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale)
    model.save_pretrained(directory)
    if kind.config in {"Gemma3Config", "LlavaConfig"}:
        _rename_tower(directory / "model.safetensors")


def _rename_tower(path: Path) -> None:
    """Give the weights of the vision tower the names that published checkpoints have, which vLLM
    expects. transformers 5 saves others."""
    from safetensors.torch import load_file, save_file

    tower = re.compile(r"^(model\.)?vision_tower\.(?!vision_model)")
    weights = {
        tower.sub(r"\1vision_tower.vision_model.", name): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


if __name__ == "__main__":
    from pathlib import Path

    _write(Path(sys.argv[1]), sys.argv[2])
