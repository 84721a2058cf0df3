"""Hints for mistyped words."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is close to `word`, or ""."""
    names = sorted(known)
    found = [x for x in names if len(word) > 4 and x.startswith(word)]  # an abbreviation
    return next(iter(found or difflib.get_close_matches(word, names, 1, 0.7)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?", or nothing if no known word is close."""
    found = closest(word, known)
    return f"; did you mean {found}?" if found else ""


def for_flags(words: Iterable[str], known: Iterable[str]) -> str:
    """Return hints for the `words` that look like flags."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    return "".join(did_you_mean(flag, known) for flag in sorted(flags))
