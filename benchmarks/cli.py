"""``pdserve bench``: replay traces, compare arms, convert and describe traces.

Only the parser is made here; what a command needs is imported when it runs.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compare.cli import add_compare
from benchmarks.options import (
    SLO_METRICS,
    TRACE_HELP,
    fraction,
    positive_float,
    positive_int,
    slo,
    whole_number,
)
from pdserve.commands.options import add_dial_options, api_key_from, dialer_from, http_tls_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.result import ReplayResult
    from benchmarks.run import ReplaySettings, RunObserver
    from benchmarks.targets import Target
    from benchmarks.workload import Shape

EXIT_OK, EXIT_FAILED_REQUESTS, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

DEFAULT_URL = "http://127.0.0.1:8000"
TICK_JITTERS = ("none", "uniform", "even")
TIME_UNITS = ("s", "ms", "us", "ns", "iso")
FORMATS = ("azure", "mooncake", "canonical")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with its commands; each sets ``handler``, a function of the parsed arguments
    that returns the exit status."""
    bench = subparsers.add_parser("bench", help="replay traces of real traffic, and compare")
    commands = bench.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    _add_replay(commands)
    add_compare(commands).set_defaults(handler=_compare)
    _add_report(commands)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="send a trace's requests when they are due and measure the answers",
        description="Replay a trace open loop. Exit status: 0 if every request ended well, 1 if "
        "one failed, 2 if the options or the trace are wrong.",
    )
    replay.set_defaults(handler=_replay)
    replay.add_argument("--trace", default="chat", metavar="TRACE", help=TRACE_HELP)
    where = replay.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        metavar="URL,...",
        help=f"OpenAI-compatible endpoint; requests go to several in turn (default: {DEFAULT_URL})",
    )
    where.add_argument(
        "--grpc", metavar="HOST:PORT,...", help="pdserve's gRPC endpoint instead, or several"
    )
    add_dial_options(replay)
    replay.add_argument("--model", help="served model (default: the only one)")
    replay.add_argument(
        "--vocab-size", type=positive_int, help="needed where the endpoint does not tell it"
    )
    _add_cut(replay)
    _add_timing(replay)
    out = replay.add_argument_group("what comes out")
    out.add_argument(
        "--slo",
        type=slo,
        default={},
        metavar="METRIC=TIME,...",
        help=f"limits, such as ttft=500ms,tpot=50ms; metrics: {', '.join(SLO_METRICS)}",
    )
    out.add_argument("--out", type=Path, metavar="FILE", help="write every request's timeline here")
    out.add_argument("--json", action="store_true", help="print the summary as JSON, not a table")


def _add_cut(replay: argparse.ArgumentParser) -> None:
    cut = replay.add_argument_group("what is sent")
    _add_shape(cut)
    cut.add_argument("--seed", type=whole_number, default=0, help="of prompts and tick jitter")
    cut.add_argument(
        "--warmup",
        type=whole_number,
        default=1,
        metavar="N",
        help="requests sent beforehand, one by one, and not measured (default: 1)",
    )


def _add_shape(cut: argparse._ArgumentGroup) -> None:
    cut.add_argument("--limit", type=positive_int, metavar="N", help="only the first N requests")
    cut.add_argument(
        "--scale-lengths",
        type=fraction,
        default=Fraction(1),
        metavar="F",
        help="multiply all lengths by F, such as 1/8 or 0.5",
    )
    cut.add_argument(
        "--max-output-tokens", type=positive_int, metavar="N", help="cut longer outputs to N"
    )
    cut.add_argument(
        "--max-total-tokens",
        type=positive_int,
        metavar="N",
        help="drop requests whose input and output exceed N (default: what the model takes)",
    )


def _add_timing(replay: argparse.ArgumentParser) -> None:
    when = replay.add_argument_group("when it is sent")
    pace = when.add_mutually_exclusive_group()
    pace.add_argument(
        "--speedup", type=positive_float, default=1.0, metavar="X", help="divide all gaps by X"
    )
    pace.add_argument(
        "--rate", type=positive_float, metavar="R", help="or by what makes R requests a second"
    )
    when.add_argument(
        "--tick-jitter",
        choices=TICK_JITTERS,
        default="uniform",
        help="how requests that a log rounded to one tick are spread over it (default: uniform)",
    )
    when.add_argument(
        "--drain-timeout",
        type=positive_float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for answers after the last request is due (default: 300)",
    )


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="print a result again, or make its report",
        description="Derive the figures from the timelines of a result of replay or compare. "
        "Exit status: 0, 2 if the file is no result, 3 if it is "
        "of an invalid comparison.",
    )
    report.set_defaults(handler=_report)
    report.add_argument("result", type=Path, metavar="FILE", help="what --out wrote")
    report.add_argument("--html", type=Path, metavar="OUT", help="write a report (of a comparison)")
    report.add_argument("--json", action="store_true", help="print the summary as JSON")


def _replay(args: argparse.Namespace) -> int:
    return _refusing(lambda: _run_replay(args))


def _run_replay(args: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from benchmarks.progress import ReplayProgress
    from benchmarks.report import render_result, stdout_console
    from benchmarks.result import write_result
    from benchmarks.run import ReplaySettings

    _check_writable(args.out)
    settings = ReplaySettings(
        trace=args.trace,
        shape=_shape(args),
        speedup=args.speedup,
        rate_per_s=args.rate,
        tick_jitter=args.tick_jitter,
        seed=args.seed,
        warmup=args.warmup,
        drain_timeout_s=args.drain_timeout,
        slo_s=args.slo,
        model=args.model,
        vocab_size=args.vocab_size,
    )
    with ReplayProgress(Console(stderr=True)) as progress:
        result = _drive(settings, args, progress)
    if args.out is not None:
        write_result(result, args.out)
    if args.json:
        sys.stdout.write(json.dumps(result.to_json(with_records=False), indent=2) + "\n")
    else:
        render_result(result, stdout_console())
    return EXIT_OK if result.summary().ok == len(result.records) else EXIT_FAILED_REQUESTS


def _shape(args: argparse.Namespace) -> Shape:
    from benchmarks.workload import Shape

    return Shape(
        scale_lengths=args.scale_lengths,
        max_output_tokens=args.max_output_tokens,
        max_total_tokens=args.max_total_tokens,
        limit=args.limit,
    )


def _drive(
    settings: ReplaySettings, args: argparse.Namespace, observer: RunObserver
) -> ReplayResult:
    """Replay on an event loop of its own."""
    import asyncio

    import uvloop

    from benchmarks.run import run_replay

    async def main() -> ReplayResult:
        target = _open_target(args)
        try:
            return await run_replay(settings, target, observer)
        finally:
            await target.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _open_target(args: argparse.Namespace) -> Target[Any]:
    from benchmarks.spread import open_grpc, open_http

    if args.grpc is not None:
        return open_grpc(args.grpc, dialer_from(args))
    return open_http(args.url or DEFAULT_URL, api_key_from(args), http_tls_from(args))


def _check_writable(path: Path | None) -> None:
    """Refuse a result file that cannot be made before the time is spent that fills it."""
    from benchmarks.errors import BenchError

    if path is not None and not path.parent.is_dir():
        raise BenchError(f"--out {path}: there is no directory {path.parent}")


def _compare(args: argparse.Namespace) -> int:
    from benchmarks.compare.cli import run

    return _refusing(lambda: run(args))


def _report(args: argparse.Namespace) -> int:
    from benchmarks.compare.files import report

    def work() -> int:
        return report(args.result, html=args.html, as_json=args.json)

    return _refusing(work)


def _refusing(run: Callable[[], int]) -> int:
    """Run a command; what it refuses is said on stderr, and becomes its exit status."""
    from benchmarks.errors import BenchError, WarmupFailed

    try:
        return run()
    except BenchError as error:
        sys.stderr.write(f"pdserve bench: {error}\n")
        return EXIT_FAILED_REQUESTS if isinstance(error, WarmupFailed) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("pdserve bench: interrupted; nothing was kept\n")
        return EXIT_INTERRUPTED
