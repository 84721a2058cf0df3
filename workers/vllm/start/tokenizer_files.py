"""Tokenizer files that a router can read without vLLM and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mistral_common.tokens.tokenizers.utils import get_one_valid_tokenizer_file
from vllm.tokenizers.mistral import MistralTokenizer


def path_for_router(tokenizer: Any, directory: Path, made: Path) -> Path:
    """Return the tokenizer's directory. If it has only an older format, write `tokenizer.json` to
    `made` and return that. For a tokenizer of Mistral's library, return its file."""
    if isinstance(tokenizer, MistralTokenizer):
        return Path(get_one_valid_tokenizer_file([str(x) for x in directory.iterdir()]))
    if (directory / "tokenizer.json").is_file():
        return directory
    tokenizer.save_pretrained(made)
    return made
