"""`pdserve chaos`: options, what a person sees, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.chaos.settings import ChaosSettings
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.chaos.result import MatrixResult
    from benchmarks.chaos.scene import Fault
    from benchmarks.chaos.table import Progress

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2
_DESCRIPTION: Final = """\
Start a service on this machine, replay a trace against it, and hurt it: one row a fault. Every
answer is compared, token by token, with that of one engine to which nothing happens. Exit code 0
where no request failed, no token was wrong and nothing was left, in every row; 1 otherwise.
docs/chaos.md says what each row does and what it does not show.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the command."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--list", action="store_true", help="say what rows there are, and end")
    parser.add_argument("--rows", metavar="A,B", help="these rows only")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--prefill", type=int, default=2, metavar="N", help="workers (default: 2)")
    parser.add_argument("--decode", type=int, default=2, metavar="N", help="workers (default: 2)")
    parser.add_argument("--requests", type=int, default=24, metavar="N", help="a row (default: 24)")
    parser.add_argument("--rate", type=float, default=6.0, metavar="PER_S", help="(default: 6)")
    parser.add_argument(
        "--soak",
        type=float,
        metavar="SECONDS",
        help="no rows: random kills every 10 s, and other faults between, for so long",
    )
    parser.add_argument(
        "--overload",
        type=float,
        metavar="SECONDS",
        help="no rows: for so long many more requests than can be served",
    )
    parser.add_argument(
        "--times", type=float, default=10.0, metavar="X", help="how many more (default: 10)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="for logs (default: a new one under /tmp)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any configuration key of the service; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    from benchmarks.chaos.faults.by_name import FAULTS
    from benchmarks.chaos.table import list_faults

    if args.list:
        list_faults(FAULTS.values())
        return EXIT_OK
    try:
        settings, faults = settings_of(args), _chosen(args.rows, args.engine)
    except BenchError as error:
        return _say(error, EXIT_BAD_INPUT)
    try:
        if args.overload is not None:
            return _run_overload(args, settings)
        if args.soak is not None:
            return _run_soak(args, settings)
        return _run_matrix(args, settings, faults)
    except BenchError as error:
        # The service did not start, or did not get over a fault.
        return _say(error, EXIT_FAILED)


def _say(error: BenchError, code: int) -> int:
    sys.stderr.write(f"pdserve chaos: {error}\n")
    return code


def settings_of(args: argparse.Namespace) -> ChaosSettings:
    """What the options ask for. Raises :class:`BenchError`."""
    import yaml

    changes = []
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise BenchError(f"--set must be SECTION.KEY=VALUE, not {text!r}")
        changes.append((key, yaml.safe_load(value)))
    for name in ("prefill", "decode", "requests"):
        if getattr(args, name) < 1:
            raise BenchError(f"--{name} must be at least 1")
    if not args.rate > 0:
        raise BenchError("--rate must be above 0")
    for name in ("soak", "overload"):
        given = getattr(args, name)
        if given is not None and not given > 0:
            raise BenchError(f"--{name} must be above 0")
    if args.soak is not None and args.overload is not None:
        raise BenchError("--soak and --overload are runs of their own")
    if not args.times > 1:
        raise BenchError("--times must be above 1")
    return ChaosSettings(
        engine=args.engine,
        prefill=args.prefill,
        decode=args.decode,
        requests=args.requests,
        rate_per_s=args.rate,
        seed=args.seed,
        changes=tuple(changes),
    )


def _chosen(rows: str | None, engine: str) -> list[Fault]:
    from benchmarks.chaos.faults.by_name import FAULTS

    names = [*FAULTS] if rows is None else [name.strip() for name in rows.split(",")]
    for name in names:
        if name not in FAULTS:
            raise BenchError(f"--rows: no row {name!r}; there are {', '.join(FAULTS)}")
        if rows is not None and engine == "fake" and FAULTS[name].needs_vllm:
            raise BenchError(f"--rows: {name} needs --engine vllm")
    return [FAULTS[name] for name in names if engine != "fake" or not FAULTS[name].needs_vllm]


def _run_matrix(args: argparse.Namespace, settings: ChaosSettings, faults: Sequence[Fault]) -> int:
    from benchmarks.chaos.matrix import run_matrix
    from benchmarks.chaos.result import to_json
    from benchmarks.chaos.table import render

    began_s = time.monotonic()
    with _progress(args) as (progress, directory):

        def done(so_far: MatrixResult) -> None:
            progress.done(so_far.rows[-1])
            keep(so_far)

        def keep(found: MatrixResult) -> None:
            if args.json is not None:
                args.json.write_text(to_json(found), encoding="utf-8")

        running = run_matrix(settings, faults, directory, doing=progress.doing, done=done)
        result = asyncio.run(running)
    render(result, time.monotonic() - began_s)
    keep(result)
    return EXIT_OK if result.passed else EXIT_FAILED


def _run_soak(args: argparse.Namespace, settings: ChaosSettings) -> int:
    from benchmarks.chaos.soak import run_soak
    from benchmarks.chaos.table import render_soak

    with _progress(args) as (progress, directory):
        result = asyncio.run(run_soak(settings, args.soak, directory, doing=progress.doing))
    render_soak(result)
    return _keep(args, result.to_json())


def _run_overload(args: argparse.Namespace, settings: ChaosSettings) -> int:
    from benchmarks.chaos.overload import run_overload
    from benchmarks.chaos.table import render_overload

    with _progress(args) as (progress, directory):
        result = asyncio.run(
            run_overload(settings, args.overload, args.times, directory, doing=progress.doing)
        )
    render_overload(result)
    return _keep(args, result.to_json())


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[tuple[Progress, Path]]:
    from benchmarks.chaos.table import Progress

    directory = args.run_dir or Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    with Progress(directory) as progress:
        yield progress, directory


def _keep(args: argparse.Namespace, result: Mapping[str, Any]) -> int:
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return EXIT_OK if result["passed"] else EXIT_FAILED
