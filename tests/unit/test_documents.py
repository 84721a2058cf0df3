"""What documents name is there: files, programs, and the tests that are said to show something."""

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
TEST = re.compile(r"`([\w/]*test_\w+)::(\w+)`")
# Where documents say of no folder.
TESTS = Path("unit/kv_transfer")


def named(pattern: re.Pattern[str]) -> list[object]:
    return [
        pytest.param(found, id=f"{path.name}: {'::'.join(found) if len(found) > 1 else found[0]}")
        for path in DOCUMENTS
        for found in sorted({m.groups() for m in pattern.finditer(path.read_text("utf-8"))})
    ]


@pytest.mark.parametrize("found", named(FILE))
def test_every_file_exists(found: tuple[str]) -> None:
    assert (ROOT / found[0]).exists()


@pytest.mark.parametrize("found", named(PROGRAM))
def test_every_program_exists(found: tuple[str]) -> None:
    path = ROOT / found[0].replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("found", named(TEST))
def test_every_test_exists(found: tuple[str, str]) -> None:
    file, name = found
    path = ROOT / "tests" / (f"{file}.py" if "/" in file else TESTS / f"{file}.py")
    text = path.read_text("utf-8")
    assert re.search(rf"^\s*(?:async )?def {name}\(|^{name} = ", text, re.MULTILINE)


def test_something_is_named() -> None:
    assert len(named(FILE)) > 20
    assert len(named(PROGRAM)) > 1
    assert len(named(TEST)) > 3
