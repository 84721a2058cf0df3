"""Makes a model large enough for prefill and decode to hurt each other on a processor:

    python -m benchmarks.large_model DIR [--layers 16] [--hidden 1024]

A Llama of random weights (205 M parameters as it is), seeded, with the demo model's tokenizer;
nothing is downloaded. Its answers mean nothing, but take as long as those of a real one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from pdserve.demo import MODEL_DIR

POSITIONS = 8192


def make(directory: Path, *, hidden: int, layers: int) -> int:
    """Writes the model into `directory` and returns how many parameters it has."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    demo = MODEL_DIR
    tokenizer = AutoTokenizer.from_pretrained(demo)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    for file in demo.glob("*token*"):
        shutil.copy(file, directory)
    return sum(p.numel() for p in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    count = make(options.directory, hidden=options.hidden, layers=options.layers)
    sys.stdout.write(f"{options.directory}: {count / 1e6:.0f} M parameters\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
