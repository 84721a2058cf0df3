"""Tests on the Python code of the newest vLLM that `pdserve[gpu]` allows.

There is no CPU build of it, so the compiled files are those of the installed one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import ROOT, run

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 1800.0
# Tests that meet the parts of vLLM that pdserve patches or reads: KV, continuations, adapters,
# parsers, a whole service, and caches with windows and states. One transport is enough.
KIND = "tests/slow/test_models.py::test_a_kind_of_model_is_handed_over_exactly"
TESTS = (
    "tests/e2e/test_handoff_exact.py",
    "tests/e2e/test_engine_promises.py",
    "tests/e2e/test_adapters.py",
    "tests/e2e/test_tool_parsing.py",
    "tests/e2e/test_pdserve_serve.py",
    f"{KIND}[Gemma-2]",
    f"{KIND}[Granite-hybrid]",
)


def overlay(wheel: Path, into: Path) -> None:
    """Unpack the Python code of `wheel` beside links to the installed compiled files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [x for x in archive.namelist() if not x.endswith(".so")])
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    installed = Path(found.origin).parent
    for compiled in installed.rglob("*.so"):
        link = into / "vllm" / compiled.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(compiled)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Return the environment of a process that imports this vLLM."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    with TemporaryDirectory(prefix="pdserve-vllm-") as name:
        directory, pip = Path(name), [sys.executable, "-m", "pip", "download", "--no-deps"]
        words = [*pip, "--only-binary=:all:", "--dest", name, *extras["gpu"]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            pytest.skip(f"the package index gives no {extras['gpu']}: {done.stderr[-500:]}")
        (wheel,) = directory.glob("*.whl")
        overlay(wheel, directory / "site")
        wheel.unlink()
        yield {
            **os.environ,
            "PYTHONPATH": str(directory / "site"),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CACHE_ROOT": str(directory / "cache"),
        }


@pytest.mark.timeout(2 * LIMIT_S)
def test_tests_of_the_tested_vllm_pass_on_the_newest_allowed(
    environment: dict[str, str],
) -> None:
    version = "import vllm, vllm.version as v; print(vllm.__file__, v.__version__)"
    assert environment["PYTHONPATH"] in run(sys.executable, "-c", version, env=environment)
    words = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", "not tcp", *TESTS)
    run(sys.executable, *words, within_s=LIMIT_S, cwd=ROOT, env=environment)
