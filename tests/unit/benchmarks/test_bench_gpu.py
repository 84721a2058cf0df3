"""The GPU benchmark on a machine without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.__main__ import main

if TYPE_CHECKING:
    import pytest


def test_without_a_gpu_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu: torch finds no CUDA GPU on this machine\n"
