"""``pdserve bench compare``. Only the parser is made here at once; the rest is imported when it
runs."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.options import TRACE_HELP, fraction, positive_float, positive_int, whole_number
from pdserve.commands.options import add_dial_options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.compare.arms import Arm
    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.run import CompareSettings
    from benchmarks.compare.session import ArmPlan

EXIT_OK, EXIT_INVALID = 0, 3
DEFAULT_ARMS = "1P1D,2A"
DEFAULT_PROBES = 8


def add_compare(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add the command; the caller sets its handler."""
    compare = commands.add_parser(
        "compare",
        help="measure disaggregated and aggregated serving side by side on this machine",
        description="Start each arm with equally many cores and the same settings, send all the "
        "same traffic in turns, and say which served it better. Exit status: 0, 2 if the options "
        "are wrong or the arms differ in what matters, 3 if the run is invalid, with its reasons.",
    )
    compare.add_argument(
        "--arms",
        metavar="ARM,...",
        help="1P1D, 2A, 1P2D, ..., name=2A, or nixl: two plain vLLM servers with NixlConnector and "
        "a small proxy (default: 1P1D,2A; none if --arm is given)",
    )
    compare.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=URL,...",
        help="one more arm, such as a running OpenAI endpoint, or several of one service; may be "
        "repeated",
    )
    compare.add_argument(
        "--baseline", metavar="ARM", help="what ratios are to (default: the last arm)"
    )
    add_dial_options(compare.add_argument_group("arms that are a URL"))
    _add_traffic(compare)
    _add_engines(compare)
    out = compare.add_argument_group("what comes out")
    for metric in ("ttft", "tpot"):
        out.add_argument(
            f"--slo-{metric}",
            type=positive_float,
            metavar="MS",
            help=f"limit on {metric.upper()}; routers started here are told too",
        )
    out.add_argument(
        "--sweep",
        nargs="?",
        type=positive_int,
        const=DEFAULT_PROBES,
        metavar="PROBES",
        help="find the highest rate at which 90 %% of requests keep the limits, with at most so "
        f"many probes an arm (default: {DEFAULT_PROBES}); with --rounds 0, only that",
    )
    out.add_argument("--out", metavar="DIR", help="write result.json and report.html there")
    out.add_argument("--json", action="store_true", help="print the summary as JSON, not a table")
    return compare


def _add_traffic(compare: argparse.ArgumentParser) -> None:
    traffic = compare.add_argument_group("what is sent")
    traffic.add_argument("--trace", default="chat", metavar="TRACE", help=TRACE_HELP)
    traffic.add_argument(
        "--rate", type=positive_float, default=2.0, metavar="R", help="requests a second (2)"
    )
    traffic.add_argument(
        "--requests", type=positive_int, default=40, metavar="N", help="for each round (40)"
    )
    traffic.add_argument(
        "--rounds", type=whole_number, default=5, metavar="K", help="for each arm, in turn (5)"
    )
    traffic.add_argument(
        "--scale-lengths",
        type=fraction,
        metavar="F",
        help="multiply all lengths by F (default: 1, and on a processor the power of a half that "
        "brings prompts to at most 512 tokens on average)",
    )
    traffic.add_argument("--max-output-tokens", type=positive_int, metavar="N")
    traffic.add_argument("--max-total-tokens", type=positive_int, metavar="N")
    traffic.add_argument(
        "--probe-seconds",
        type=positive_float,
        default=15.0,
        metavar="S",
        help="how long a probe of --sweep sends at least (15)",
    )
    traffic.add_argument("--seed", type=whole_number, default=0)
    traffic.add_argument(
        "--drain-timeout", type=positive_float, default=60.0, metavar="SECONDS", help="(60)"
    )


def _add_engines(compare: argparse.ArgumentParser) -> None:
    from pdserve.commands.options import add_config_options

    engines = compare.add_argument_group("arms that are started here")
    engines.add_argument(
        "--cores",
        type=positive_int,
        metavar="N",
        help="for the workers of each arm together (default: what divides evenly of those there "
        "are, leaving two to router and client where that leaves each worker one)",
    )
    engines.add_argument(
        "--kv-cache-mib",
        type=positive_int,
        metavar="N",
        help="KV cache of each arm, shared between its workers; needed where arms have different "
        "numbers of workers",
    )
    engines.add_argument(
        "--arm-set",
        action="append",
        default=[],
        metavar="ARM:KEY=VALUE",
        help="a configuration key that this arm alone has; say --differ with it",
    )
    engines.add_argument(
        "--differ",
        default="",
        metavar="NAME,...",
        help="settings in which arms may differ, because they are what is compared",
    )
    engines.add_argument(
        "--restart",
        action="store_true",
        help="keep one arm alive at a time, for devices that hold only one",
    )
    engines.add_argument(
        "--face",
        choices=("grpc", "http"),
        help="how arms are driven (default: grpc, which tells what each chunk holds; http for all "
        "where one is a URL or nixl)",
    )
    engines.add_argument("--url-model", metavar="NAME", help="model to ask of arms that are URLs")
    engines.add_argument("--vocab-size", type=positive_int, help="where no arm tells it")
    add_config_options(compare, {"--model": "worker.model", "--engine": "worker.engine"})


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write what was asked for. Raises BenchError and ConfigError."""
    import json
    from pathlib import Path

    from rich.console import Console

    from benchmarks.compare.files import write_outputs
    from benchmarks.compare.summary import summarise_compare
    from benchmarks.compare.table import render_compare
    from benchmarks.report import stdout_console
    from benchmarks.result import jsonable

    directory = Path(args.out) if args.out else None
    settings, plans = prepare(args)
    result = drive(settings, plans, Console(stderr=True), directory)
    summary = summarise_compare(result)
    if directory is not None:
        for path in write_outputs(result, directory):
            sys.stderr.write(f"{path}\n")
    if args.json:
        sys.stdout.write(json.dumps(jsonable(summary), indent=2) + "\n")
    else:
        render_compare(result, summary, stdout_console())
    return EXIT_INVALID if summary.validity.invalid else EXIT_OK


def prepare(args: argparse.Namespace) -> tuple[CompareSettings, list[ArmPlan]]:
    """What the options ask for. Raises BenchError and ConfigError before anything is started."""
    import os

    from benchmarks.compare.arms import parse_arms, share_cores, with_overrides
    from benchmarks.compare.run import CompareSettings
    from benchmarks.errors import BenchError

    texts = args.arms if args.arms is not None else "" if len(args.arm) > 1 else DEFAULT_ARMS
    arms = parse_arms([*(x for x in texts.split(",") if x), *args.arm])
    arms = with_overrides(arms, args.arm_set)
    names = [arm.name for arm in arms]
    baseline = args.baseline or names[-1]
    if baseline not in names:
        raise BenchError(f"--baseline {baseline} is not an arm; there are {', '.join(names)}")
    limits = {"ttft": args.slo_ttft, "tpot": args.slo_tpot}
    slo_s = {name: limit / 1000 for name, limit in limits.items() if limit is not None}
    if args.sweep and not slo_s:
        raise BenchError("--sweep needs --slo-ttft or --slo-tpot: what is to be kept?")
    if not args.rounds and not args.sweep:
        raise BenchError("--rounds 0 measures nothing without --sweep")
    needs_http = any(arm.needs_http for arm in arms)
    if needs_http and args.face == "grpc":
        raise BenchError("--face grpc: a URL or nixl is driven over HTTP, so all must be")
    cores = share_cores(arms, len(os.sched_getaffinity(0)), args.cores)
    settings = CompareSettings(
        trace=args.trace,
        scale_lengths=args.scale_lengths,
        max_output_tokens=args.max_output_tokens,
        max_total_tokens=args.max_total_tokens,
        rate_per_s=args.rate,
        requests=args.requests,
        rounds=args.rounds,
        probes=args.sweep or 0,
        probe_s=args.probe_seconds,
        seed=args.seed,
        drain_timeout_s=args.drain_timeout,
        slo_s=slo_s,
        baseline=baseline,
        face="http" if needs_http else args.face or "grpc",
        restart=args.restart,
        meant_to_differ=tuple(x for x in args.differ.split(",") if x),
        endpoint_model=args.url_model,
        vocab_size=args.vocab_size,
    )
    return settings, _plans(arms, args, cores)


def _plans(arms: Sequence[Arm], args: argparse.Namespace, cores: int) -> list[ArmPlan]:
    from benchmarks.compare.arms import arm_changes
    from benchmarks.compare.session import ArmPlan
    from pdserve.commands.options import api_key_from, changes_from, http_tls_from
    from pdserve.config import load_config, to_mapping

    promised = {"ttft": args.slo_ttft, "tpot": args.slo_tpot}
    slo = {f"router.slo.{name}_s": x / 1000 for name, x in promised.items() if x is not None}
    # A limit that is asked for is one to keep; without any nobody is refused for being late.
    slo["router.slo.refuse_beyond"] = 1.0 if slo else 0.0
    common = slo | changes_from(args)
    engine = load_config(args.config, common).worker.engine
    kv_cache_bytes = None if args.kv_cache_mib is None else args.kv_cache_mib << 20
    plans = []
    for arm in arms:
        config: dict[str, Any] | None = None
        if arm.url is None:
            own = arm_changes(arm, cores=cores, kv_cache_bytes=kv_cache_bytes, engine=engine)
            config = to_mapping(load_config(args.config, {**common, **own}))
        plans.append(ArmPlan(arm, config, api_key_from(args), http_tls_from(args)))
    return plans


def drive(
    settings: CompareSettings, plans: Sequence[ArmPlan], console: Any, directory: Any
) -> CompareResult:
    """Compare on an event loop of its own; arms log to ``directory``, or where nobody will look."""
    import asyncio

    import uvloop

    from benchmarks.compare.progress import CompareProgress
    from benchmarks.compare.run import run_compare

    with (
        _log_directory(directory) as logs,
        CompareProgress(console, settings, len(plans)) as progress,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(run_compare(settings, plans, progress, directory=logs))


@contextlib.contextmanager
def _log_directory(directory: Any) -> Iterator[Any]:
    import tempfile
    from pathlib import Path

    from benchmarks.errors import BenchError

    if directory is None:
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made:
            yield Path(made)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {directory}: {error.strerror or error}") from None
    yield directory / "logs"
