"""requirements/gpu.lock, which nothing here installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_lock_meets_every_requirement_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(x for e in ("gpu", "nixl", "otlp", "dev") for x in extras[e]),
    ]
    pins = {}
    for line in (ROOT / "requirements/gpu.lock").read_text().splitlines():
        if not line.startswith("#"):
            (pin,) = (requirement := Requirement(line)).specifier
            assert pin.operator == "==", line
            pins[requirement.name] = pin.version
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
