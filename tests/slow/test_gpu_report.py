"""`make gpu-report` on a machine without a GPU, and on the CUDA shim."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import ROOT, run
from tests.support.gpu_caches import missing_gpu
from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from pathlib import Path

SHIM = ROOT / ".venv-gpu-shim/shim"  # made last


def report(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Return what the command printed, and its file."""
    if missing_gpu() == "":
        pytest.skip("this machine has a GPU")
    out = folder / "gpu-report.json"
    words = " ".join((f"--out {out}", *options))
    command = ["make", "gpu-report", f"VENV={folder}/none", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "COLUMNS": "200"}
    told = run(*command, f"ARGS={words}", cwd=ROOT, env=environment, within_s=4 * START_S)
    return told, json.loads(out.read_text())


def test_without_a_gpu_each_part_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    told, found = report(tmp_path, "--engine fake --shim none")
    assert found["machine"]["torch"]
    assert "needs the NVIDIA driver 580" in found["machine"]["driver"]
    (engines,) = (x for x in found["steps"] if x["part"] == "engines")
    others = [x for x in found["steps"] if x is not engines]
    assert {x["part"] for x in others} == {"tests", "copies", "transports"}
    said = {(x["status"], x["reason"]) for x in others}
    assert said == {("not run", "torch finds no CUDA GPU")}
    assert engines["status"] == "ran"
    assert [x["variant"] for x in engines["rows"]] == ["1P1D", "1A"]
    assert all(x["ttft_p50, ms"] > 0 < x["itl_p50, ms"] for x in engines["rows"])
    assert "transports, nccl, BLHNC, idle: not run: torch finds no CUDA GPU" in told


def test_on_the_shim_kv_moves_exactly_and_no_speed_is_taken_for_real(tmp_path: Path) -> None:
    if not SHIM.exists():
        pytest.skip("make gpu-shim")
    told, found = report(tmp_path, "--only copies,transports,engines")
    assert found["note"] == "on the CUDA shim: kernels and times are not real"
    became = {f"{x['part']}, {x['step']}": x for x in found["steps"]}
    transports = (f"transports, {x}, BLHNC, idle" for x in ("cuda_ipc", "nccl"))
    for name in ("copies, idle", "copies, chunks", *transports):
        assert became[name]["status"] == "ran", became[name]
        assert f"{name}: ran (on the CUDA shim: kernels and times are not real)" in told
    assert became["copies, busy"]["reason"] == "needs kernels"
    engines = became["engines, 1P1D beside one engine"]
    assert (engines["status"], engines["reason"]) == ("not run", "torch finds no CUDA GPU")
