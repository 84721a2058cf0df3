"""What an installation for GPUs, and a worker on one, need of the machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.process import gpu_machine
from pdserve.process.gpus import check_machine

ROOT = Path(__file__).resolve().parents[3]


def driver(folder: Path, version: int, result: int = 0) -> str:
    """Build a driver's library that says that it runs CUDA `version`. Return its path."""
    source, made = folder / "libcuda.c", folder / f"libcuda-{version}-{result}.so"
    source.write_text(f"int cuDriverGetVersion(int *v) {{ *v = {version}; return {result}; }}\n")
    subprocess.run(["cc", "-shared", "-o", made, source], check=True)
    return str(made)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_driver_is_asked_for_the_newest_cuda_that_it_runs(tmp_path: Path) -> None:
    first = "CUDA 13 needs the NVIDIA driver 580 or newer"
    old = gpu_machine.unfit_driver(13, driver(tmp_path, 12080))
    assert old == f"{first}; that of this machine runs CUDA 12.8 at most: install a newer one"
    assert gpu_machine.unfit_driver(12, driver(tmp_path, 12080)) == ""
    assert gpu_machine.unfit_driver(13, driver(tmp_path, 13000)) == ""
    assert gpu_machine.unfit_driver(13, driver(tmp_path, 0, result=3)) == ""  # does not say
    absent = str(tmp_path / "libcuda.so.1")
    assert gpu_machine.unfit_driver(13, absent) == f"{first}, and this machine has none ({absent})"


def test_a_compiler_is_found_as_triton_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither gcc nor clang is on the path (Debian" in gpu_machine.missing_compiler()
    (tmp_path / "clang").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert gpu_machine.missing_compiler() == ""
    monkeypatch.setenv("CC", "nvc")
    assert "CC=nvc is no program" in gpu_machine.missing_compiler()
    monkeypatch.delenv("CC")
    (tmp_path / "Python.h").unlink()
    assert f"{tmp_path}/Python.h, which is missing" in gpu_machine.missing_compiler()


def test_a_worker_without_a_fitting_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.process.gpus.unfit_driver", lambda cuda: f"no {cuda}")
    with pytest.raises(ConfigError, match=r"worker\.engine: no 13") as raised:
        check_machine("13.0")
    assert raised.value.field == "worker.engine"


def test_an_installation_for_gpus_is_refused_before_it_begins(tmp_path: Path) -> None:
    """With a Python of another version, or no compiler: nothing is made."""
    folder = tmp_path / "gpu"
    python = tmp_path / "python3"
    # As if this Python were 3.10.
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "\nimport sys; sys.version_info = (3, 10, 0)\n'
        'from pdserve.process.gpu_machine import main; sys.exit(main())"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "gpu-install", f"VENV={folder}", f"PYTHON={python}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode
    assert "are for Python 3.12 on x86_64" in done.stderr
    assert "make gpu-install VENV=.venv-gpu PYTHON=python3.12" in done.stderr
    assert not folder.exists()
