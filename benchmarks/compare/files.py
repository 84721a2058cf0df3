"""The files of a comparison, and reading them again."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from benchmarks.compare.html.page import render_page
from benchmarks.compare.result import CompareResult, dump, from_json, to_json, write_text
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import render_compare
from benchmarks.errors import BenchError
from benchmarks.report import render_result, stdout_console
from benchmarks.result import SCHEMA as REPLAY_SCHEMA
from benchmarks.result import jsonable, read_result

if TYPE_CHECKING:
    from pathlib import Path

EXIT_OK, EXIT_INVALID = 0, 3


def write_outputs(result: CompareResult, directory: Path) -> list[Path]:
    """Write ``result.json`` and ``report.html``; raises :class:`BenchError`."""
    data, page = directory / "result.json", directory / "report.html"
    write_text(data, dump(to_json(result) | {"summary": jsonable(summarise_compare(result))}))
    write_text(page, render_page(result))
    return [data, page]


def read_compare(path: Path) -> CompareResult:
    """Read ``result.json``; raises :class:`BenchError`."""
    try:
        return from_json(_read(path))
    except BenchError as error:
        raise BenchError(f"{path}: {error}") from None


def report(path: Path, *, html: Path | None, as_json: bool) -> int:
    """Print a result again from its timelines; returns the exit status."""
    whole = _read(path)
    schema = whole.get("schema") if isinstance(whole, dict) else None
    if schema == REPLAY_SCHEMA:
        if html is not None:
            raise BenchError(f"{path}: there is no HTML report of a single replay")
        replay = read_result(path)
        if as_json:
            _print(replay.to_json(with_records=False))
        else:
            render_result(replay, stdout_console())
        return EXIT_OK
    result = read_compare(path)
    summary = summarise_compare(result)
    if html is not None:
        write_text(html, render_page(result))
    if as_json:
        _print(jsonable(summary))
    else:
        render_compare(result, summary, stdout_console())
    return EXIT_INVALID if summary.validity.invalid else EXIT_OK


def _print(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _read(path: Path) -> object:
    try:
        whole: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None
    return whole
