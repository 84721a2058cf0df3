"""The files in requirements: what they pin, with hashes, meets pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {path.name.removesuffix(".lock"): path for path in ROOT.glob("requirements/*.lock")}
# Extras of pyproject.toml that a lock, or an image's lock, has beside the dependencies.
EXTRAS = {
    "cpu": ("cpu", "gguf", "nixl", "otlp", "kubernetes", "postgres", "s3", "dev"),
    "gpu": ("gpu", "gguf", "nixl", "otlp", "postgres", "s3", "dev"),
    "router-image": ("kubernetes", "otlp", "postgres", "s3"),
    "gpu-runtime": ("gpu", "gguf", "nixl", "otlp", "postgres", "s3"),
    "worker-image": ("gguf", "otlp"),
    "worker-cpu-image": ("cpu", "gguf", "otlp"),
}


def pins_of(name: str) -> dict[str, str]:
    """Return the version of each package of a lock. Fail if a pin is wrong or has no hash."""
    pins: dict[str, str] = {}
    text = re.sub(r"^#.*\n", "", LOCKS[name].read_text("utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        words, *hashes = line.split(" --hash=")
        requirement = Requirement(words)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        assert requirement.name not in pins, line
        assert hashes, f"{words}has no hash: run `make locks`"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", x.strip()) for x in hashes), line
        pins[requirement.name] = pin.version
    return pins


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_each_pin_of_a_lock_has_hashes(name: str) -> None:
    assert pins_of(name)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_meets_every_requirement_of_the_project(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras, pins = project["optional-dependencies"], pins_of(name)
    wanted = [*project["dependencies"], *(x for extra in EXTRAS[name] for x in extras[extra])]
    for requirement in map(Requirement, wanted):
        pinned = pins[requirement.name.lower()]
        assert requirement.specifier.contains(pinned, prereleases=True), requirement


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ("router-image", "cpu"),
        ("worker-cpu-image", "cpu"),
        ("worker-image", "gpu"),
        ("gpu-runtime", "gpu"),
        ("torch", "cpu"),
        ("build", "cpu"),
    ],
)
def test_a_part_of_a_lock_has_its_pins(part: str, whole: str) -> None:
    pins = pins_of(whole)
    assert {x: v for x, v in pins_of(part).items() if pins.get(x, v) != v} == {}


def test_the_lock_of_a_gpu_machine_has_no_tools_of_developers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    tools = {Requirement(x).name.lower() for x in extras["dev"]}
    used = {Requirement(x).name.lower() for each in EXTRAS["gpu-runtime"] for x in extras[each]}
    # vLLM needs these too.
    assert pins_of("gpu-runtime").keys() & (tools - used) == {"anthropic", "openai", "requests"}


def test_torch_has_one_version_with_and_without_cuda() -> None:
    plain = pins_of("torch")
    for name in ("torch", "torchvision"):
        assert pins_of(f"{name}-cpu")[name] == f"{plain[name]}+cpu"


def test_installations_from_a_lock_check_hashes() -> None:
    """Assert that each installation from a lock uses `--require-hashes`."""
    text = (ROOT / "Makefile").read_text("utf-8")
    assert "LOCKED := install --no-deps --require-hashes\n" in text
    installs = re.findall(r"\$\(PIP\) install.*|-m pip .*install.*", text)
    assert {x for x in installs if " -r" in x} == set()
    docker = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    locked = re.findall(r"pip install[^&]*--require-hashes -r \S*/(\S+)\.lock", docker)
    assert locked == ["build", "router-image", "$lock", "worker-cpu-image", "build", "worker-image"]
    ray = yaml.safe_load((ROOT / "deploy/ray/cluster.yaml").read_text("utf-8"))
    locked_command, project = ray["setup_commands"]
    assert locked_command.endswith("--no-deps --require-hashes -r gpu-runtime.lock -r ray.lock")
    assert project == "pip install --no-deps --no-build-isolation ~/pdserve"
    # pip refuses a package named twice.
    assert pins_of("gpu-runtime").keys().isdisjoint(pins_of("ray"))


@pytest.mark.parametrize(
    ("image", "is_refused"),
    [
        ("docker.io/python:3.12", True),
        ("docker.io/python@sha256:00", False),
        ("localhost/x", False),
    ],
)
def test_an_image_is_built_from_images_by_digest(image: str, is_refused: bool) -> None:
    docker = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    checks = re.findall(r'RUN (case "\$(\w+)" .* esac)', docker)
    assert {base for _, base in checks} == set(
        re.findall(r"^FROM \$\{(\w+)\}", docker, re.MULTILINE)
    )
    for script, base in checks:
        done = subprocess.run(
            ["sh", "-c", script], env={base: image}, check=False, capture_output=True, text=True
        )
        assert (done.returncode, f"{base}={image} has no digest" in done.stderr) == (
            int(is_refused),
            is_refused,
        )
