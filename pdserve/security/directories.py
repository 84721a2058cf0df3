"""Directories that a client names, and that have to be below an allowed one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def resolved_within(allowed: Iterable[str], path: str, files: Sequence[str] = ()) -> Path | None:
    """Return the resolved directory `path` if it and its `files`, by default all it has, are below
    an allowed directory, with their links resolved; else None. Call it in a thread."""
    roots = [Path(root).expanduser().resolve() for root in allowed]

    def is_within(found: Path) -> bool:
        return any(found.is_relative_to(root) for root in roots)

    try:
        directory = Path(path).expanduser().resolve()
        if not is_within(directory):  # its files are not looked at
            return None
        inside = [directory / x for x in files] or directory.glob("*")
        return directory if all(is_within(x.resolve()) for x in inside) else None
    except (RuntimeError, ValueError, OSError):  # circular links, a null byte, a long name
        return None
