"""The GPU's kernel equals the reference, and is one that a GPU would take. Without a GPU it is
interpreted, and compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import WAIT_S

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton comes with GPU builds only"
)


@pytest.mark.parametrize(
    ("script", "interpret", "expected"),
    [
        pytest.param("triton_interpreted.py", "1", "compared 24\n", id="as-the-reference"),
        pytest.param("triton_compiled.py", "0", "compiled 12\n", id="for-a-gpu"),
    ],
)
def test_the_kernel_moves_what_the_reference_moves_and_compiles(
    script: str, interpret: str, expected: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), "24"],
        env={
            **os.environ,
            "TRITON_INTERPRET": interpret,
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
