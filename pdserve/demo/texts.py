"""Reads the text files that the corpus is made from."""

import tomllib
from pathlib import Path
from typing import Any, Final

_TEXT_DIR: Final = Path(__file__).resolve().parent / "text"


def read_text(name: str) -> str:
    """The text file `name`."""
    return (_TEXT_DIR / name).read_text("utf-8")


def read_table(name: str) -> dict[str, Any]:
    """The TOML file `name`."""
    return tomllib.loads(read_text(name))


def read_words(key: str, separator: str | None = None) -> tuple[str, ...]:
    """One list of `words.toml`, split at white space or at `separator`."""
    words: str = read_table("words.toml")[key]
    return tuple(words.split(separator))
