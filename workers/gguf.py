"""Conversion of a GGUF file to a model directory that vLLM loads.

`python -m workers.gguf FILE DIRECTORY` is run by pdserve/model/gguf.py. The file may be malformed,
so a separate process with limited memory reads it.
"""

from __future__ import annotations

import argparse
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve.process.child import add_child_options, exit_at_once, served_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

_SHOWN_WEIGHTS = 3
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Keys and texts of tokens that end an answer, as in llama.cpp.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
# Values of `tokenizer.ggml.pre` unknown to transformers: values that split text as GPT-2 does, and
# values that also split after each digit.
_GPT2_SPLITS = {
    *("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("exaone4", "gigachat", "mellum", "a.x-4.0", "jina-es", "jina-de", "roberta-bpe"),
}
_DIGIT_SPLITS = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}
# Those that begin with BOS by default, and do not split a word that is a token.
_LLAMA3_SPLITS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}


def convert(file: Path, directory: Path) -> None:
    """Write config, weights (bfloat16), tokenizer and chat template of `file` to `directory`, as
    transformers reads them. Raises ConfigError if the file lacks weights of its architecture, and
    transformers' error for a file that it does not read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # transformers would also read other files of the model's folder.
    with TemporaryDirectory() as folder:
        Path(folder, file.name).symlink_to(file)
        source = {"pretrained_model_name_or_path": folder, "gguf_file": file.name}
        config = AutoConfig.from_pretrained(**source)
        _read_rope_scaling(file, config)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        ends = _read_tokenizer(file, tokenizer)
        model, found = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(model.config).state_dict()
    weights = model.state_dict()
    # transformers initialises missing weights at random, and accepts any shape.
    wrong = {
        "are missing": found["missing_keys"],
        "are unknown": found["unexpected_keys"],
        "have a wrong shape": [x for x in weights if weights[x].shape != expected[x].shape],
    }
    for what, names in wrong.items():
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN_WEIGHTS])
            raise ConfigError(f"weights of its architecture {what}: {shown} ({len(names)} in all)")
    config.name_or_path = file.name
    model.generation_config.eos_token_id = ends
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _read_tokenizer(file: Path, tokenizer: Any) -> list[int]:
    """Set the properties of a tokenizer that transformers does not read, and return the ids of all
    tokens that end an answer. Raises ConfigError for a property that would change the tokens of a
    text."""
    from tokenizers import decoders, pre_tokenizers
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    metadata, _ = read_gguf_metadata(str(file))
    ggml = {x.removeprefix("tokenizer.ggml."): y for x, y in metadata.items()}
    fast, pre, is_bpe = tokenizer.backend_tokenizer, ggml.get("pre", "default"), False
    if ggml["model"] == "gpt2":
        is_bpe = True
        if pre in _DIGIT_SPLITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            split = pre_tokenizers.ByteLevel(add_prefix_space=False)
            fast.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
        elif pre not in {*_GPT2_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS}:
            raise ConfigError(f"its split of text is not read: tokenizer.ggml.pre is {pre}")
        fast.model.ignore_merges = pre in _LLAMA3_SPLITS
    elif not ggml.get("add_space_prefix", True) and isinstance(
        fast.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        spaces = decoders.Replace("▁", " ")
        fast.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    adds_bos = ggml.get("add_bos_token", pre in _LLAMA3_SPLITS if is_bpe else True)
    tokenizer.add_bos_token = bool(adds_bos) and tokenizer.bos_token is not None
    tokenizer.add_eos_token = bool(ggml.get("add_eos_token")) and tokenizer.eos_token is not None
    named = "tokenizer.chat_template."
    templates = {x.removeprefix(named): y for x, y in metadata.items() if x.startswith(named)}
    if templates:
        default = {"default": tokenizer.chat_template} if tokenizer.chat_template else {}
        tokenizer.chat_template = {**templates, **default}
    return _ends(ggml, tokenizer.get_vocab())


def _ends(ggml: Mapping[str, Any], vocab: Mapping[str, int]) -> list[int]:
    size = ggml["tokens"]  # their number
    ends = {x: ggml[f"{x}_token_id"] for x in _END_KEYS if f"{x}_token_id" in ggml}
    for name, end in ends.items():
        if end >= size:
            raise ConfigError(f"tokenizer.ggml.{name}_token_id is {end}; it has {size} tokens")
    # transformers adds tokens that are not in the file.
    found = {*ends.values(), *(vocab[x] for x in _END_TEXTS if vocab.get(x, size) < size)}
    if "<|return|>" in vocab and "<|end|>" in vocab:
        found.discard(vocab["<|end|>"])  # ends one of an answer's messages
    return sorted(found)


def _read_rope_scaling(file: Path, config: PreTrainedConfig) -> None:
    """Add the RoPE scaling of Llama 3 to `config`, which llama.cpp stores as a factor for each
    frequency. transformers reads no RoPE scaling, but for gpt-oss: raise ConfigError for others,
    because answers would be wrong."""
    import numpy as np
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    header, (metadata, _) = GgufHeader.from_file(str(file)), read_gguf_metadata(str(file))
    kind = metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    tensors = {x.name: x for x in header.tensors if x.name.startswith("rope_")}
    factors = tensors.pop("rope_freqs.weight", None)
    if tensors or (kind != "none" and header.architecture != "gpt-oss"):
        raise ConfigError(f"its RoPE scaling is not read: {', '.join(tensors) or kind}")
    if factors is None:
        return
    start = header.data_start + factors.offset
    stored = np.fromfile(file, np.float32, count=factors.nbytes // 4, offset=start)
    plain = config.rope_parameters["rope_theta"] ** -np.linspace(0, 1, len(stored), endpoint=False)
    config.rope_parameters = {
        **config.rope_parameters,
        **_LLAMA3_ROPE,
        "factor": float(stored.max(initial=1.0)),
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    if scaled.shape != stored.shape or not np.allclose(plain / scaled.numpy(), stored, rtol=1e-3):
        raise ConfigError("its RoPE scaling is not read: rope_freqs.weight is not that of Llama 3")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--max-memory", type=int, required=True, help="bytes of private memory")
    add_child_options(parser)
    args = parser.parse_args()
    # A file that names custom code must not make transformers download it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with served_process(args) as reports:
        resource.setrlimit(resource.RLIMIT_DATA, (args.max_memory, args.max_memory))
        convert(args.file, args.directory)
        reports.ready({})
    exit_at_once(0)


if __name__ == "__main__":
    main()
