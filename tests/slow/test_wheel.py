"""What `make dist` writes, and its wheel in an environment that has its dependencies and nothing of
this checkout."""

from __future__ import annotations

import json
import re
import signal
import site
import sys
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from pdserve import __version__
from tests.support.commands import ROOT, run
from tests.support.pdserve_up import UpProcess
from tests.support.timeouts import START_S, WAIT_S

RELEASE = ROOT / ".venv-release"
MAKE_S = 300


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `make dist` wrote."""
    if not (RELEASE / "installed").exists():
        pytest.skip("needs .venv-release, which `make test-tools` makes")
    directory = tmp_path_factory.mktemp("dist")
    # The stamps count as up to date: a test installs nothing into these environments.
    stamps = [f"--old-file={x}/installed" for x in (sys.prefix, RELEASE.name)]
    words = ("make", *stamps, "dist", f"VENV={sys.prefix}", f"DIST={directory}")
    run(*words, cwd=ROOT, within_s=MAKE_S)
    return directory


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


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


def test_a_release_has_a_source_archive_a_wheel_and_a_list_of_packages(dist: Path) -> None:
    names = sorted(x.name for x in dist.iterdir())
    abi3 = rf"pdserve-{__version__}-cp311-abi3-manylinux\S+\.whl"
    assert len(names) == 3
    assert re.fullmatch(abi3, names[0]), names
    assert names[1:] == [f"pdserve-{__version__}.tar.gz", "pdserve.cdx.json"]
    listed = json.loads((dist / names[2]).read_text("utf-8"))
    root = listed["metadata"]["component"]
    assert (root["name"], root["version"]) == ("pdserve", __version__)
    assert "grpcio" in {x["name"] for x in listed["components"]}


def test_the_source_archive_has_what_builds_it(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {x.partition("/")[2] for x in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "kv_transfer/_copy.c"} <= names
    assert [x for x in names if x.startswith(("tests/", "deploy/"))] == []


def test_the_installed_wheel_has_the_version_and_the_c_module(
    commands: Path, tmp_path: Path
) -> None:
    assert run(commands / "pdserve", "--version", cwd=tmp_path) == f"pdserve {__version__}\n"
    shown = "import kv_transfer._copy as c; from importlib.metadata import version as v; "
    shown += "print(c.__file__, v('pdserve'))"
    file, version = run(commands / "python", "-c", shown, cwd=tmp_path).split()
    assert Path(file).is_relative_to(commands.parent)
    assert file.endswith(".abi3.so")
    assert version == __version__


def test_the_wheel_has_only_files_that_serve(wheel: Path) -> None:
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
