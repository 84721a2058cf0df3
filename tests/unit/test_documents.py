"""Files and programs that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/*/*.md")
    for path in ROOT.glob(pattern)
)
OURS = "pdserve|router|workers|kv_transfer|benchmarks|tests|docs|protos"
FILE = re.compile(rf"`((?:{OURS})/[\w/.-]*\.\w+|(?:{OURS})/[\w/-]*/)`")
PROGRAM = re.compile(rf"python -m ((?:{OURS})[\w.]*)")


def named(pattern: re.Pattern[str]) -> list[object]:
    return [
        pytest.param(found[0], id=f"{path.name}: {found[0]}")
        for path in DOCUMENTS
        for found in sorted({m.groups() for m in pattern.finditer(path.read_text("utf-8"))})
    ]


@pytest.mark.parametrize("found", named(FILE))
def test_every_file_exists(found: str) -> None:
    assert (ROOT / found).exists()


@pytest.mark.parametrize("found", named(PROGRAM))
def test_every_program_exists(found: str) -> None:
    path = ROOT / found.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_something_is_named() -> None:
    assert named(FILE)
    assert named(PROGRAM)
