"""The files of an engine's tokenizer that a router can use, without vLLM and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mistral_common.tokens.tokenizers.utils import get_one_valid_tokenizer_file
from vllm.tokenizers.mistral import MistralTokenizer


def path_for_router(tokenizer: Any, directory: Path, made: Path) -> Path:
    """Return the tokenizer's directory, or `made`, to which `tokenizer.json` is written if the
    model has only an older format. Return the file itself if it is of Mistral's own library."""
    if isinstance(tokenizer, MistralTokenizer):
        return Path(get_one_valid_tokenizer_file([str(x) for x in directory.iterdir()]))
    if (directory / "tokenizer.json").is_file():
        return directory
    tokenizer.save_pretrained(made)
    return made
