"""The wheel in an environment that has its dependencies and nothing of this checkout."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import time
import urllib.request
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]


def _run(command: Sequence[str | Path], cwd: Path) -> str:
    ended = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    listed = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", directory, source], source
    )
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the commands of an environment with the wheel."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    _run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], home)
    # A path in a .pth file is searched for packages; its own .pth files, among them the one that
    # points at this checkout, are not read.
    where = _run([python, "-c", "import site; print(site.getsitepackages()[0])"], home).strip()
    (Path(where) / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return home / "bin"


def test_it_holds_what_serves_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "pdserve/demo/model/model.safetensors" in names
    assert "benchmarks/compare.py" in names or "benchmarks/compare/__init__.py" in names
    assert [x for x in names if x.startswith(("tests/", "examples/"))] == []
    assert [x for x in names if x.startswith(("benchmarks/results/", "benchmarks/micro/"))] == []


def test_it_serves_the_demo_model(commands: Path, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    options = ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready_file)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    log = (tmp_path / "up.log").open("w+")
    up = subprocess.Popen(
        [commands / "pdserve", "up", *options],
        cwd=tmp_path,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        ends_at = time.monotonic() + START_S
        while not ready_file.exists():
            assert up.poll() is None, (tmp_path / "up.log").read_text()
            assert time.monotonic() < ends_at, (tmp_path / "up.log").read_text()
            time.sleep(0.1)
        http = json.loads(ready_file.read_text())["http"]
        body = {"model": "pdserve-demo", "prompt": "Prefill and decode", "max_tokens": 8}
        request = urllib.request.Request(
            f"{http}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] > 0
        assert answer["pdserve"]["receipt"]["transfer_blocks"] > 0
        up.send_signal(signal.SIGINT)
        assert up.wait(WAIT_S) == 0
    finally:
        if up.poll() is None:
            up.kill()
            up.wait()
        log.close()


def test_bench_simulates(commands: Path, tmp_path: Path) -> None:
    command = [commands / "pdserve", "bench", "simulate", "--prefill", "1", "--decode", "1"]
    assert json.loads(_run([*command, "--json"], tmp_path))
