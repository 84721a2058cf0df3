"""Several comparisons made one after the other by one program, each with options of its own."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console

from benchmarks.compare.cli import add_compare, drive, prepare
from benchmarks.compare.files import write_outputs
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import render_compare
from benchmarks.errors import BenchError
from benchmarks.report import stdout_console
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.compare.result import CompareResult

EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130


def refusing(program: str, run: Callable[[], int]) -> int:
    """Its exit status; what it refuses is said on stderr, and is 2; Ctrl-C is 130."""
    try:
        return run()
    except (BenchError, ConfigError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted; what had ended before is kept\n")
        return EXIT_INTERRUPTED


def compare_all(
    program: str, series: Mapping[str, Sequence[str]], directory: Path
) -> dict[str, CompareResult]:
    """Make, print and write each comparison, by the options of `pdserve bench compare` that
    ``series`` has for its name. All options are read before anything is started; raises
    :class:`BenchError` and :class:`ConfigError`."""
    parser = argparse.ArgumentParser(prog=program)
    add_compare(parser.add_subparsers())
    prepared = {
        name: prepare(parser.parse_args(["compare", *options])) for name, options in series.items()
    }
    results = {}
    for name, (settings, plans) in prepared.items():
        sys.stderr.write(f"{name}\n")
        result = drive(settings, plans, Console(stderr=True), directory / name)
        render_compare(result, summarise_compare(result), stdout_console())
        for path in write_outputs(result, directory / name):
            sys.stderr.write(f"{path}\n")
        results[name] = result
    return results


def invalid(results: Mapping[str, CompareResult]) -> list[str]:
    """The names of those that must not be believed."""
    return [name for name, x in results.items() if summarise_compare(x).validity.invalid]
