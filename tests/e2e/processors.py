"""What a multimodal checkpoint has beside its language model, as small as it may be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# As the models of `kinds` read it, each some of it.
VISION = {
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
# Words that the tokenizer lacks, by their names in its configuration.
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    **{f"lines_{n}": "\n" * n for n in range(1, 5)},
}


def write_processor(directory: Path, processor: str, *parts: str) -> dict[str, Any]:
    """Write the processor's files beside those of the tokenizer. Return what the model's
    configuration says of its words."""
    import transformers

    words = _GEMMA if processor.startswith("Gemma") else _QWEN
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words.values())})
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": words}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    first, *others = [getattr(transformers, part)() for part in parts]
    whole = getattr(transformers, processor)(first, tokenizer, *others)
    whole.save_pretrained(directory)
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
    if words is _GEMMA:
        return {f"{name}_index": ids[name] for name in ("image_token", "boi_token", "eoi_token")}
    return {f"{name}_id": number for name, number in ids.items()}
