"""Conversion of a GGUF file to a model directory that vLLM loads.

`python -m workers.gguf FILE DIRECTORY` is run by pdserve/model/gguf.py. The file may be malformed,
so it is read in a process of its own, whose memory is limited.
"""

from __future__ import annotations

import argparse
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.process.child import add_child_options, exit_at_once, served_process

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SHOWN_WEIGHTS = 3
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(file: Path, directory: Path) -> None:
    """Write config, weights (bfloat16), tokenizer and chat template of `file` to `directory`, as
    transformers reads them. Raises ConfigError if the file lacks weights of its architecture, and
    what transformers raises for a file that it does not read."""
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
    # transformers initialises weights that are not in the file at random, and takes any shape.
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
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


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
    # A file with code of its own must not make transformers download it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with served_process(args) as reports:
        resource.setrlimit(resource.RLIMIT_DATA, (args.max_memory, args.max_memory))
        convert(args.file, args.directory)
        reports.ready({})
    exit_at_once(0)


if __name__ == "__main__":
    main()
