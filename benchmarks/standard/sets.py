"""Which comparisons are standard, and the file that keeps one run of them."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from benchmarks.compare.result import CompareResult, dump, from_json, to_json, write_text
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).resolve().parents[2]
SCHEMA: Final = "pdserve.bench.standard/1"
_KEPT: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-*.json"
_LIMITS: Final = ("--slo-ttft", "1000", "--slo-tpot", "100")

SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": (
        *("--trace", "chat", "--rate", "6", "--requests", "60", "--rounds", "5"),
        *("--sweep", "5", "--probe-seconds", "8"),
        *_LIMITS,
    ),
    "longchat": (
        *("--trace", "longchat", "--rate", "4", "--requests", "40", "--rounds", "5"),
        *_LIMITS,
    ),
}
"""The options of `pdserve bench compare` for each. About seven minutes on two cores."""


@dataclass(frozen=True, slots=True)
class StandardResult:
    """One run of the standard set; ``results`` by the name of the set."""

    created: str
    results: Mapping[str, CompareResult]

    @property
    def file_name(self) -> str:
        """``<date>-<host class>.json``."""
        return f"{self.created[:10]}-{host_class(self)}.json"


def host_class(run: StandardResult) -> str:
    """What kind of machine it was: cores, instruction set, device."""
    result = next(iter(run.results.values()))
    devices = {
        device
        for arm in result.arms
        if arm.settings is not None
        for device in arm.settings.of_workers.get("device", ())
    }
    system = str(result.host.get("system", platform.machine())).rpartition(" ")[2]
    return "-".join([f"{result.host.get('cores')}-core", system, *sorted(devices)])


def write_standard(run: StandardResult, directory: Path) -> Path:
    """Keep a run; raises :class:`BenchError`."""
    path = directory / run.file_name
    write_to(run, path)
    return path


def write_to(
    run: StandardResult, path: Path, *, but: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Keep a run in a file, with other words for some (paths of this machine); raises
    :class:`BenchError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {name: to_json(result) for name, result in run.results.items()}
    text = dump({"schema": SCHEMA, "created": run.created, "results": results})
    # What is kept is published: where this checkout lies is nobody's business.
    for old, new in {f"{ROOT}/": "", **but}.items():
        text = text.replace(old, new)
    write_text(path, text)


def read_standard(path: Path) -> StandardResult:
    """Read a kept run; raises :class:`BenchError`."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    if not isinstance(whole, dict) or whole.get("schema") != SCHEMA:
        raise BenchError(f"{path} is not a run of the standard set ({SCHEMA})")
    results = {name: from_json(item) for name, item in whole["results"].items()}
    return StandardResult(whole["created"], results)


def newest(directory: Path) -> StandardResult | None:
    """The run that was made last of those that are kept; raises :class:`BenchError`."""
    runs = [read_standard(path) for path in sorted(directory.glob(_KEPT))]
    return max(runs, key=lambda run: run.created, default=None)
