"""Which package may import which, and that modules do not import each other in circles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The table is also in CONTRIBUTING.md.
MAY_IMPORT = {
    "pdserve": set(),
    "kv_transfer": {"pdserve"},
    "workers": {"pdserve", "kv_transfer"},
    "router": {"pdserve"},
    "benchmarks": {"pdserve", "kv_transfer", "workers", "router"},
}
HEAVY = {"torch", "vllm", "transformers"}
# The router and the commands start in a second because they import none of HEAVY.
LIGHT = {"pdserve", "router", "benchmarks"}
MAY_BE_HEAVY = "benchmarks/micro/"


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, type-checking imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            found |= {node.module or "", *(f"{node.module}.{x.name}" for x in node.names)}
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    others = set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tops = {module.partition(".")[0] for module in imports(path)}
        # Commands start the other packages.
        if not name.startswith("pdserve/cli/"):
            wrong += [f"{name} imports {top}" for top in tops & others]
        if package in LIGHT and not name.startswith(MAY_BE_HEAVY):
            wrong += [f"{name} imports {top}" for top in tops & HEAVY]
    assert wrong == []


def test_every_package_is_in_the_table() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(MAY_IMPORT)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: imports(path) & modules.keys() - {name} for name, path in modules.items()}
    # Remove modules that import nothing that is left, until only circles remain.
    while free := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in free}
    # What is left also holds modules that import a circle without being part of one.
    while free := {n for n in graph if not any(n in targets for targets in graph.values())}:
        graph = {name: targets for name, targets in graph.items() if name not in free}
    assert sorted(graph) == []
