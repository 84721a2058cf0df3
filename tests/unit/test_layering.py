"""Who may import whom, by reading the imports. The table is docs/internals.md's."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset({"pdserve", "router", "workers", "kv_transfer", "benchmarks"})
HEAVY = frozenset({"torch", "vllm", "transformers"})

# package: (what of ours it may import, which heavy ones)
TABLE: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "pdserve": (frozenset(), frozenset()),
    "kv_transfer": (
        frozenset({"pdserve.types", "pdserve.errors"}),
        frozenset({"torch", "vllm"}),
    ),
    "workers": (frozenset({"pdserve", "kv_transfer"}), HEAVY),
    "router": (frozenset({"pdserve"}), frozenset()),
    "benchmarks": (frozenset({"pdserve"}), frozenset()),
}
# Measure the KV plane without engines.
MEASURES_KV = ("benchmarks/micro/",)
# Time decisions by themselves, or make them on a virtual clock: without the router's APIs.
RUNS_ROUTER_CODE = ("benchmarks/simulate.py", "benchmarks/plan.py")
# Run vLLM or make a model by themselves, as what ours is measured against.
RUNS_TORCH = ("benchmarks/compare/nixl.py",)


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, module and whether the import runs only when a function does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in late
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is relative"
            assert node.module is not None
            yield node.lineno, node.module, id(node) in late


def within(module: str, allowed: frozenset[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def trespasses(package: str) -> Iterator[str]:
    ours, heavy = TABLE[package]
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for line, module, is_late in imports(path):
            top = module.partition(".")[0]
            if top in OURS and top != package and not within(module, ours):
                # The command line starts the others, and only when a command runs.
                if name.startswith("pdserve/cli/") and is_late:
                    continue
                # Measures the KV plane without engines: an HTTP endpoint does not show it.
                if name.startswith(MEASURES_KV) and top == "kv_transfer":
                    continue
                if name.startswith(RUNS_ROUTER_CODE) and top in ("router", "workers"):
                    continue
                yield f"{name}:{line} imports {module}"
            if top in HEAVY and top not in heavy and not name.startswith(RUNS_TORCH):
                yield f"{name}:{line} imports {module}"


@pytest.mark.parametrize("package", TABLE)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert list(trespasses(package)) == []


def test_every_package_is_in_the_table() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(TABLE)


def test_the_reader_of_imports_sees_late_and_early_ones(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import os.path\ndef f():\n    from vllm.v1 import engine\n")
    assert list(imports(path)) == [(1, "os.path", False), (3, "vllm.v1", True)]
