"""Profiles by name, and those in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.profiling.document import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.profiling.document import Profile

NAMED: Final[Mapping[str, str]] = {"demo": "demo-2-cores.json"}


def read_profile(name_or_path: str) -> Profile:
    """Raises ConfigError."""
    if name_or_path in NAMED:
        return read(Path(__file__).parent / NAMED[name_or_path])
    return read(Path(name_or_path))
