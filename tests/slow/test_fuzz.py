"""Coverage-guided fuzzing of the parsers of untrusted bytes, and of the C module under
AddressSanitizer. FUZZ_SECONDS for each target (`make fuzz SECONDS=60`). Without it 5, and every run
tries the same inputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.support.commands import ROOT
from tests.support.timeouts import START_S

SECONDS = int(os.environ.get("FUZZ_SECONDS", "5"))
SEED = () if "FUZZ_SECONDS" in os.environ else ("-seed=1",)
SLOW_INPUT_S = 10
ROUNDS = 2000


@pytest.mark.skipif(find_spec("atheris") is None, reason="needs atheris: make test-tools")
def test_no_input_raises_what_is_not_declared(tmp_path: Path) -> None:
    """Fuzz each target. Findings go to the corpus, which tests/unit/test_fuzz_corpus.py repeats."""
    limits = [f"-max_total_time={SECONDS}", f"-timeout={SLOW_INPUT_S}", "-rss_limit_mb=2048"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", str(tmp_path), *limits, *SEED, *TARGETS],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=len(TARGETS) * SECONDS + START_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert ended.stdout.count("\tDONE") == len(TARGETS)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Build the C module with AddressSanitizer. Return it and the library to preload."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = run("gcc", "-print-file-name=libasan.so").stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("needs libasan, which comes with Debian's gcc")
    built = tmp_path_factory.mktemp("asan") / "_copy.so"
    flags = ["-O1", "-g", "-fPIC", "-shared", "-fsanitize=address,undefined"]
    include = f"-I{sysconfig.get_path('include')}"
    done = run("gcc", *flags, include, str(ROOT / "kv_transfer/_copy.c"), "-o", str(built))
    assert done.returncode == 0, done.stderr
    return built, library


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=10 * START_S,
        check=False,
    )


def drive(sanitized: tuple[Path, str], rounds: str) -> subprocess.CompletedProcess[str]:
    built, library = sanitized
    options = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    options |= {"UBSAN_OPTIONS": "halt_on_error=1", "PYTHONPATH": str(ROOT)}
    return run(sys.executable, "-m", "tests.fuzz.copy_driver", str(built), rounds, env=options)


def test_the_c_module_touches_no_byte_beyond_its_pages(sanitized: tuple[Path, str]) -> None:
    done = drive(sanitized, str(ROUNDS))
    assert done.returncode == 0, done.stderr[-6000:]


def test_the_sanitizer_sees_a_byte_beyond_a_page(sanitized: tuple[Path, str]) -> None:
    done = drive(sanitized, "overrun")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
