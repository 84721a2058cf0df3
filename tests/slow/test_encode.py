"""Encode engines: one engine = prefill and decode = encode, prefill and decode, token for token."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import ROOT
from tests.support.model_matrix import install_torchvision
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from pathlib import Path


# One whose images have grids of any size, and one whose images all have as many tokens.
@pytest.mark.parametrize("kind", ["Qwen2.5-VL", "Gemma-3, multimodal"])
def test_answers_with_an_encode_engine_are_those_of_one_engine(kind: str, tmp_path: Path) -> None:
    env = dict(os.environ)
    if not find_spec("torchvision"):
        try:
            env["PYTHONPATH"] = install_torchvision(str(tmp_path))
        except subprocess.CalledProcessError:
            pytest.skip("the package index has no torchvision")
    command = [sys.executable, "-m", "tests.support.encode_checks", kind]
    subprocess.run(command, check=True, cwd=ROOT, env=env, timeout=2 * START_S + WAIT_S)
