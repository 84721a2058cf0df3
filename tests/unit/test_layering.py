"""Which package and which folder may import which, and that modules do not import each other in
circles. A string that names a module counts as an import, except in circles: a module may start a
process of another one that imports it."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pdserve.process.entry_points import COMMANDS, PROCESSES

ROOT = Path(__file__).resolve().parents[2]
# The table is also in CONTRIBUTING.md.
MAY_IMPORT = {
    "pdserve": set(),
    "kv_transfer": {"pdserve"},
    "workers": {"pdserve", "kv_transfer"},
    "router": {"pdserve"},
    "benchmarks": {"pdserve", "kv_transfer", "workers", "router"},
}
# Folders and modules of a package from the lowest up; each imports only those before it. What is
# not named, such as the ground of pdserve/, is below all that are.
LAYERS = {
    "pdserve": ("deploy", "cli", "__main__"),
    "router": (
        *("__init__", "admission", "store", "placement", "fleet", "metrics", "guardrails"),
        *("attempt", "dialects", "walk", "steps", "serve", "request_path", "control", "intake"),
        *("virtual", "api", "live", "main", "cli"),
    ),
    "workers": ("cli",),
    "benchmarks": ("cli",),
}
# Commands belong to their packages, which use what the command line of pdserve/ offers.
COMMAND_LINE = "pdserve.cli"
MAY_USE_COMMAND_LINE = ("pdserve/", "benchmarks/", "router/cli.py", "workers/cli.py")
HEAVY = {"torch", "vllm", "transformers"}
# The router and the commands start in a second because they import none of HEAVY.
LIGHT = {"pdserve", "router", "benchmarks"}
MAY_BE_HEAVY = "benchmarks/micro/"
_NAME = re.compile(rf"\b(?:{'|'.join(MAY_IMPORT)})(?:\.[A-Za-z_]\w*)+")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports anywhere, type-checking imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            found |= {node.module or "", *(f"{node.module}.{x.name}" for x in node.names)}
    return frozenset(found)


@functools.cache
def uses(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, and those of ours that its strings name."""
    found = set(imports(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(_NAME.findall(node.value)) & MODULES.keys()
    return frozenset(found)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    others = set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = name_of(path)
        tops = {module.partition(".")[0] for module in uses(path)}
        wrong += [f"{name} imports {top}" for top in tops & others]
        if package in LIGHT and not name.startswith(MAY_BE_HEAVY):
            wrong += [f"{name} imports {top}" for top in tops & HEAVY]
    assert wrong == []


@pytest.mark.parametrize("package", LAYERS)
def test_no_import_runs_up_between_the_layers_of_a_package(package: str) -> None:
    order = LAYERS[package]

    def layer(module: str) -> int:
        part = module.removeprefix(package).removeprefix(".").partition(".")[0]
        return order.index(part) if part in order else -1

    wrong = [
        f"{name} imports {target}"
        for name, path in MODULES.items()
        for target in uses(path) & MODULES.keys()
        if name.partition(".")[0] == target.partition(".")[0] == package
        and layer(target) > layer(name)
    ]
    assert wrong == []


def test_no_dialect_imports_another() -> None:
    """Of its folder, a dialect imports its writer and what all dialects share."""
    folder = "router.dialects."
    names = [x.removeprefix(folder) for x in MODULES if x.startswith(folder)]
    values = {"session_ids", "image_parts", "parsed_request"}
    allowed = {x: {"fields", "conversation", f"{x}_writer"} | values for x in names}
    allowed |= {x: set() for x in values} | {"fields": values}
    wrong = [
        f"{name} imports {target}"
        for name in names
        for target in set(names) - allowed[name]
        if folder + target in uses(MODULES[folder + name])
    ]
    assert wrong == []


def test_every_part_of_the_router_has_a_layer() -> None:
    parts = {p.stem for p in (ROOT / "router").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert parts - {"__pycache__"} == set(LAYERS["router"])


def test_only_commands_use_the_command_line() -> None:
    wrong = [
        name_of(path)
        for path in MODULES.values()
        if not name_of(path).startswith(MAY_USE_COMMAND_LINE)
        and any(f"{module}.".startswith(f"{COMMAND_LINE}.") for module in uses(path))
    ]
    assert wrong == []


@pytest.mark.parametrize("group", [COMMANDS, PROCESSES])
def test_entry_points_are_installed_and_name_functions(group: str) -> None:
    """An environment that was not installed again lacks new entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"][group]
    assert {x.name: x.value for x in entry_points(group=group)} == declared
    for value in declared.values():
        module, _, function = value.partition(":")
        body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
        assert function in [x.name for x in body if isinstance(x, ast.FunctionDef)], value


def test_every_package_is_in_the_table() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(MAY_IMPORT)


def test_no_call_unpacks_a_tuple_literal() -> None:
    """`f(*(a, b))` keeps a call on one line, and hides which argument is which."""
    wrong = [
        f"{name_of(path)}:{argument.lineno}"
        for path in sorted([*MODULES.values(), *(ROOT / "tests").rglob("*.py")])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {name: path for name, path in MODULES.items() if path.name != "__init__.py"}
    graph = {name: imports(path) & modules.keys() - {name} for name, path in modules.items()}
    # Remove modules that import nothing that is left, until only circles remain.
    while free := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in free}
    # What is left also holds modules that import a circle without being part of one.
    while free := {n for n in graph if not any(n in targets for targets in graph.values())}:
        graph = {name: targets for name, targets in graph.items() if name not in free}
    assert sorted(graph) == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest would collect neither."""
    files = [x for x in ROOT.glob("tests/**/test_*.py") if "node_modules" not in x.parts]
    names = Counter(x.name for x in files)
    assert [x for x in files if names[x.name] > 1] == []
