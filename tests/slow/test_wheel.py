"""The wheel in an environment that has its dependencies and nothing of this checkout."""

from __future__ import annotations

import json
import signal
import site
import sys
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from tests.patience import START_S, WAIT_S
from tests.up_process import UpProcess, copy_sources, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    copy_sources(source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ("-q", "--no-deps", "--no-build-isolation", "-w", directory)
    run(*pip, "wheel", *options, source, cwd=source)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the commands of an environment with the wheel."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    # A path in a .pth file is searched for packages; its own .pth files, among them the one that
    # points at this checkout, are not read.
    where = run(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    (Path(where) / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return home / "bin"


def test_it_holds_what_serves_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "pdserve/demo/model/model.safetensors" in names
    assert "benchmarks/compare.py" in names or "benchmarks/compare/__init__.py" in names
    assert [x for x in names if x.startswith(("tests/", "examples/"))] == []
    assert [x for x in names if x.startswith(("benchmarks/results/", "benchmarks/micro/"))] == []


def test_it_serves_the_demo_model(commands: Path, tmp_path: Path) -> None:
    options = ("--http-port", "0", "--grpc-port", "0")
    running = UpProcess(tmp_path, *options, python=str(commands / "python"), cwd=tmp_path)
    try:
        url = running.wait_until_serving(within_s=START_S)["http"]
        body = {"model": "pdserve-demo", "prompt": "Prefill and decode", "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] > 0
        assert answer["pdserve"]["receipt"]["transfer_blocks"] > 0
        running.send(signal.SIGINT)
        assert running.wait() == 0
    finally:
        running.close()


def test_bench_simulates(commands: Path, tmp_path: Path) -> None:
    words = ("bench", "simulate", "--prefill", "1", "--decode", "1", "--json")
    assert json.loads(run(commands / "pdserve", *words, cwd=tmp_path))
