"""The house's limits on size: a file has one job, and a function can be seen at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "router", "workers", "kv_transfer", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5


def sources(package: str) -> list[Path]:
    generated = ROOT / "pdserve" / "v1"
    paths = sorted((ROOT / package).rglob("*.py"))
    return [path for path in paths if generated not in path.parents]


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_longer_than_it_may_be(package: str) -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sources(package)}
    assert lengths
    assert {str(p): n for p, n in lengths.items() if n > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_longer_than_it_may_be(package: str) -> None:
    lengths = {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources(package)
        for node in functions(path)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_takes_more_by_position_than_it_may(package: str) -> None:
    counts = {
        f"{path}:{node.lineno} {node.name}": positional(node)
        for path in sources(package)
        for node in functions(path)
    }
    assert {name: n for name, n in counts.items() if n > MAX_POSITIONAL} == {}
