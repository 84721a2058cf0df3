"""`pdserve bench`: options and exit statuses. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.cli.options import (
    add_config_options,
    add_dial_options,
    api_key_from,
    changes_from,
    dialer_from,
    http_tls_from,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.run import CompareSettings, VariantPlan
    from benchmarks.progress import Progress
    from benchmarks.replay import ReplayResult

OK, FAILED, BAD_INPUT, INVALID, INTERRUPTED = 0, 1, 2, 3, 130
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_VARIANTS = "1P1D,2A"
# Metrics that can carry an SLO; benchmarks.metrics computes them.
SLO_METRICS = ("ttft", "ttft_sched", "tpot", "tt2t", "e2e", "e2e_sched")
_TRACE = "chat, code, longchat, the path of a file, or several joined by + (default: chat)"
T = TypeVar("T")
_Parsers = Any  # argparse has no public name for its subparsers


def register(subparsers: _Parsers) -> None:
    """Add `bench` with its commands. Each sets `handler`, which returns the exit status."""
    bench = subparsers.add_parser("bench", help="replay traces, compare, break and simulate")
    commands = bench.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    for add, run in (
        (_add_replay, _replay),
        (_add_compare, _compare),
        (_add_report, _report),
        (_add_chaos, _chaos),
        (_add_simulate, _simulate),
        (_add_plan, _plan),
    ):
        add(commands).set_defaults(handler=_guarded(run))


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Turn errors into a message and an exit status."""

    def handler(args: argparse.Namespace) -> int:
        from benchmarks.errors import BenchError, WarmupFailed

        try:
            return run(args)
        except BenchError as error:
            sys.stderr.write(f"pdserve bench: {error}\n")
            return FAILED if isinstance(error, WarmupFailed) else BAD_INPUT
        except KeyboardInterrupt:
            sys.stderr.write("pdserve bench: interrupted\n")
            return INTERRUPTED

    return handler


class _Wide(argparse.HelpFormatter):
    """One line an option, so that the help of a command fits a screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=120)


def _command(commands: _Parsers, name: str, about: str, details: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=details,
        usage=f"pdserve bench {name} [options]",
        formatter_class=_Wide,
    )
    return parser


def _settings(kind: type[T], args: argparse.Namespace, **more: Any) -> T:
    """Fill a dataclass with the options of the same names, and with `more`."""
    given = {x.name: getattr(args, x.name) for x in fields(kind) if hasattr(args, x.name)}  # type: ignore[arg-type]
    return kind(**(given | more))


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on an event loop of its own."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# -- replay


def _add_replay(commands: _Parsers) -> argparse.ArgumentParser:
    replay = _command(
        commands,
        "replay",
        "send the requests of a trace to an endpoint and measure the answers",
        "Send each request when it is due (open loop). Exit status: 0, 1 if a request "
        "failed, 2 for wrong options or a malformed trace.",
    )
    add = replay.add_argument
    where = replay.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL,...", help=f"OpenAI endpoint, or several (default: {DEFAULT_URL})"
    )
    where.add_argument("--grpc", metavar="HOST:PORT,...", help="pdserve's gRPC API instead")
    add_dial_options(replay)
    add("--model", help="served model (default: the only one)")
    add("--vocab-size", type=_count, help="if the endpoint does not tell it")
    add("--trace", default="chat", metavar="TRACE", help=_TRACE)
    add("--limit", type=_count, metavar="N", help="only the first N requests")
    _add_shape(replay)
    speed = replay.add_mutually_exclusive_group()
    speed.add_argument("--speedup", type=_positive, default=1.0, metavar="F", help="of arrivals")
    speed.add_argument(
        "--rate", dest="rate_per_s", type=_positive, metavar="R", help="mean requests/s instead"
    )
    add(
        "--tick-jitter",
        choices=("none", "uniform", "even"),
        default="uniform",
        help="how to spread requests that the log rounded to one moment",
    )
    add("--seed", type=_whole, default=0, help="for prompts and jitter")
    add("--warmup", type=_whole, default=1, metavar="N", help="requests (1)")
    add("--drain-timeout", dest="drain_timeout_s", type=_positive, default=300.0, metavar="S")
    add(
        "--slo",
        dest="slo_s",
        type=_slo,
        default={},
        metavar="METRIC=TIME,...",
        help=f"limits, such as ttft=500ms,tpot=50ms, on {', '.join(SLO_METRICS)}",
    )
    add("--out", type=Path, metavar="FILE", help="write all timelines there")
    add("--json", action="store_true", help="print the summary as JSON")
    return replay


def _add_shape(parser: argparse.ArgumentParser, default: Fraction | None = Fraction(1)) -> None:
    add = parser.add_argument
    note = "" if default else "; default: 1, on a CPU so that prompts have at most 512 on average"
    add(
        "--scale-lengths",
        type=_fraction,
        default=default,
        metavar="F",
        help=f"multiply all lengths, such as 1/8{note}",
    )
    add("--max-output-tokens", type=_count, metavar="N", help="cut longer outputs")
    add("--max-total-tokens", type=_count, metavar="N", help="drop longer requests")


def _replay(args: argparse.Namespace) -> int:
    import json

    from benchmarks.client import open_grpc, open_http
    from benchmarks.errors import BenchError
    from benchmarks.progress import Progress
    from benchmarks.replay import ReplaySettings, run_replay, write_text
    from benchmarks.report.tables import render_replay, stdout_console
    from benchmarks.workload import Shape

    if args.out is not None and not args.out.parent.is_dir():
        raise BenchError(f"--out {args.out}: there is no directory {args.out.parent}")
    settings = _settings(ReplaySettings, args, shape=_settings(Shape, args))

    async def work(progress: Progress) -> ReplayResult:
        if args.grpc is not None:
            target = open_grpc(args.grpc, dialer_from(args), api_key_from(args))
        else:
            target = open_http(args.url or DEFAULT_URL, api_key_from(args), http_tls_from(args))
        try:
            return await run_replay(settings, target, progress)
        finally:
            await target.aclose()

    with Progress() as progress:
        result: ReplayResult = run_async(work(progress))
    if args.out is not None:
        write_text(args.out, json.dumps(result.to_json(), separators=(",", ":")) + "\n")
    if args.json:
        sys.stdout.write(json.dumps(result.to_json(with_records=False), indent=2) + "\n")
    else:
        render_replay(result, stdout_console())
    return OK if result.summary().ok == len(result.records) else FAILED


# -- compare


def _add_compare(commands: _Parsers) -> argparse.ArgumentParser:
    compare = _command(
        commands,
        "compare",
        "measure disaggregated and aggregated serving side by side",
        "Start each variant with as many cores and the same settings, send all the "
        "same traffic in turns, and print figures with intervals. Exit status: 0, 2 for wrong "
        "options or variants that differ, 3 if the run is invalid, 130 if interrupted.",
    )
    add = compare.add_argument
    add(
        *("--arms", "--variants"),
        dest="variants",
        metavar="V,...",
        help=f"1P1D, 2A, name=2A, nixl (vLLM's own P/D), ... (default: {DEFAULT_VARIANTS})",
    )
    add(
        *("--arm", "--variant"),
        dest="endpoints",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="one more variant, such as a running OpenAI endpoint",
    )
    add(
        *("--arm-set", "--variant-set"),
        dest="variant_set",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE",
        help="a configuration key of one variant (add --differ)",
    )
    add("--differ", default="", metavar="SETTING,...", help="what may differ")
    add("--baseline", metavar="NAME", help="for ratios (default: the last)")
    add("--cores", type=_count, metavar="N", help="of each variant's workers")
    add("--kv-cache-mib", type=_count, metavar="N", help="of each variant's workers together")
    add("--restart", action="store_true", help="run only one variant at a time")
    add("--api", choices=("grpc", "http"), help="(default: grpc if all have it)")
    add("--url-model", metavar="NAME", help="model of endpoints")
    add("--vocab-size", type=_count, help="if no variant tells it")
    add_dial_options(compare)
    add("--trace", default="chat", metavar="TRACE", help=_TRACE)
    add(
        "--rate", dest="rate_per_s", type=_positive, default=2.0, metavar="R", help="requests/s (2)"
    )
    add("--requests", type=_count, default=40, metavar="N", help="a round (40)")
    add("--rounds", type=_whole, default=5, metavar="K", help="in turn (5)")
    _add_shape(compare, None)
    add("--seed", type=_whole, default=0)
    add("--drain-timeout", dest="drain_timeout_s", type=_positive, default=60.0, metavar="S")
    for metric in ("ttft", "tpot"):
        add(f"--slo-{metric}", type=_positive, metavar="MS", help="limit; routers are told too")
    add(
        "--sweep",
        nargs="?",
        type=_count,
        const=8,
        metavar="PROBES",
        help="find the highest rate with 90 %% within the limits (8 probes a variant)",
    )
    add(
        "--probe-seconds",
        dest="probe_s",
        type=_positive,
        default=15.0,
        metavar="S",
        help="of a probe (15)",
    )
    add("--out", type=Path, metavar="DIR", help="for result.json and report.html")
    add("--resume", type=Path, metavar="DIR", help="continue the run in DIR")
    add("--json", action="store_true", help="print the summary as JSON")
    add_config_options(compare, {"--model": "worker.model", "--engine": "worker.engine"})
    return compare


def _compare(args: argparse.Namespace) -> int:
    import tempfile

    from benchmarks.compare.result import from_json
    from benchmarks.compare.run import run_compare
    from benchmarks.errors import BenchError
    from benchmarks.progress import Progress
    from benchmarks.replay import read_json

    settings, plans = prepare(args)
    directory: Path | None = args.resume or args.out
    before = from_json(read_json(args.resume / "result.json")) if args.resume else None
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--out {directory}: {error.strerror or error}") from None
    kept: list[CompareResult] = []

    async def work(logs: Path, progress: Progress) -> None:
        from contextlib import aclosing

        results = run_compare(settings, plans, progress, directory=logs, before=before)
        async with aclosing(results):  # type: ignore[type-var]
            async for result in results:
                kept[:] = [result]
                if directory is not None:
                    _write(result, directory)

    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made, Progress() as progress:
        try:
            run_async(work(directory / "logs" if directory else Path(made), progress))
        except KeyboardInterrupt:
            if not kept:
                raise
            is_interrupted = True
    if directory is not None:
        sys.stderr.write(f"{directory / 'result.json'}\n{directory / 'report.html'}\n")
    code = _print_compare(kept[0], as_json=args.json)
    if is_interrupted:
        sys.stderr.write("pdserve bench: interrupted; these are the rounds so far\n")
        return INTERRUPTED
    return code


def _write(result: CompareResult, directory: Path) -> None:
    from benchmarks.compare import summary
    from benchmarks.compare.result import to_json
    from benchmarks.replay import write_text
    from benchmarks.report.page import render_page

    found = summary.to_json(summary.summarise_compare(result))
    write_text(directory / "result.json", to_json(result, found))
    write_text(directory / "report.html", render_page(result))


def _print_compare(result: CompareResult, *, as_json: bool) -> int:
    import json

    from benchmarks.compare.summary import summarise_compare, to_json
    from benchmarks.report.tables import render_compare, stdout_console

    summary = summarise_compare(result)
    if as_json:
        sys.stdout.write(json.dumps(to_json(summary), indent=2) + "\n")
    else:
        render_compare(result, summary, stdout_console())
    return INVALID if summary.validity.invalid else OK


def prepare(args: argparse.Namespace) -> tuple[CompareSettings, list[VariantPlan]]:
    """Check all options before anything is started. Raises BenchError and ConfigError."""
    import os

    from benchmarks.compare.run import CompareSettings, VariantPlan
    from benchmarks.compare.variants import config_changes, parse_variants, share_cores
    from benchmarks.errors import BenchError
    from pdserve.config import load_config, to_mapping

    default = "" if len(args.endpoints) > 1 else DEFAULT_VARIANTS
    texts = [x for x in (args.variants or default).split(",") if x] + args.endpoints
    variants = parse_variants(texts, args.variant_set)
    names = [variant.name for variant in variants]
    baseline = args.baseline or names[-1]
    if baseline not in names:
        raise BenchError(f"--baseline {baseline} is not a variant; there are {', '.join(names)}")
    limits = {"ttft": args.slo_ttft, "tpot": args.slo_tpot}
    slo_s = {name: limit / 1000 for name, limit in limits.items() if limit is not None}
    if args.sweep and not slo_s:
        raise BenchError("--sweep needs --slo-ttft or --slo-tpot")
    if not args.rounds and not args.sweep:
        raise BenchError("--rounds 0 measures nothing without --sweep")
    needs_http = any(variant.needs_http for variant in variants)
    if needs_http and args.api == "grpc":
        raise BenchError("--api grpc: a URL or nixl is measured over HTTP, so all must be")
    more = {
        "probes": args.sweep or 0,
        "slo_s": slo_s,
        "baseline": baseline,
        "api": "http" if needs_http else args.api or "grpc",
        "differ": tuple(x for x in args.differ.split(",") if x),
        "endpoint_model": args.url_model,
    }
    settings = _settings(CompareSettings, args, **more)
    slo: dict[str, object] = {f"router.slo.{name}_s": x for name, x in slo_s.items()}
    # Without limits no request is refused for being late.
    slo["router.slo.reject_factor"] = 1.0 if slo else 0.0
    common = slo | changes_from(args)
    engine = load_config(args.config, common).worker.engine
    kv_cache_bytes = None if args.kv_cache_mib is None else args.kv_cache_mib << 20
    cores = share_cores(variants, len(os.sched_getaffinity(0)), args.cores)
    plans = []
    for variant in variants:
        config = None
        if variant.url is None:
            own = config_changes(
                variant, cores=cores, kv_cache_bytes=kv_cache_bytes, engine=str(engine)
            )
            config = to_mapping(load_config(args.config, {**common, **own}))
        plans.append(VariantPlan(variant, config, api_key_from(args), http_tls_from(args)))
    return settings, plans


# -- report


def _add_report(commands: _Parsers) -> argparse.ArgumentParser:
    report = _command(
        commands,
        "report",
        "print a kept result again, or make its report",
        "Compute the figures from the timelines that replay or compare kept. Exit "
        "status: 0, 2 if the file is no result, 3 if the comparison is invalid.",
    )
    add = report.add_argument
    add("result", type=Path, metavar="FILE", help="what --out wrote")
    add("--html", type=Path, metavar="OUT", help="write report.html")
    add("--json", action="store_true", help="print the summary as JSON")
    return report


def _report(args: argparse.Namespace) -> int:
    import json

    from benchmarks.compare.result import from_json
    from benchmarks.errors import BenchError
    from benchmarks.replay import SCHEMA, ReplayResult, parse, read_json, write_text
    from benchmarks.report.page import render_page
    from benchmarks.report.tables import render_replay, stdout_console

    whole = read_json(args.result)
    if isinstance(whole, dict) and whole.get("schema") == SCHEMA:
        if args.html is not None:
            raise BenchError(f"{args.result}: a single replay has no HTML report")
        replay = parse(whole, ReplayResult)
        if args.json:
            sys.stdout.write(json.dumps(replay.to_json(with_records=False), indent=2) + "\n")
        else:
            render_replay(replay, stdout_console())
        return OK
    try:
        result = from_json(whole)
    except BenchError as error:
        raise BenchError(f"{args.result}: {error}") from None
    if args.html is not None:
        write_text(args.html, render_page(result))
    return _print_compare(result, as_json=args.json)


# -- chaos


def _add_chaos(commands: _Parsers) -> argparse.ArgumentParser:
    chaos = _command(
        commands,
        "chaos",
        "break a service in many ways and check every answer",
        "Start a service, send it requests, and break it in one way a scenario. Every "
        "answer is compared, token by token, with that of an engine to which nothing happens. Exit "
        "status: 0 if no request failed, no token was wrong and no KV block leaked, else 1.",
    )
    add = chaos.add_argument
    add("--list", action="store_true", help="list the scenarios")
    add("--only", metavar="NAME,...", help="these scenarios (default: all)")
    add("--engine", choices=("vllm", "fake"), default="vllm")
    add("--prefill", type=_count, default=2, metavar="N", help="workers (2)")
    add("--decode", type=_count, default=2, metavar="N", help="workers (2)")
    add("--requests", type=_count, default=24, metavar="N", help="a scenario (24)")
    add(
        "--rate", dest="rate_per_s", type=_positive, default=6.0, metavar="R", help="requests/s (6)"
    )
    add("--seed", type=_whole, default=1)
    add("--json", action="store_true", help="print the rows as JSON")
    add("--run-dir", type=Path, metavar="DIR", help="for logs (default: a new one)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    return chaos


def _chaos(args: argparse.Namespace) -> int:
    import json
    import tempfile
    from contextlib import aclosing

    from benchmarks.chaos.matrix import ChaosSettings, Row, print_rows, run_matrix
    from benchmarks.chaos.scenarios import SCENARIOS
    from benchmarks.errors import BenchError
    from benchmarks.progress import Progress
    from benchmarks.report.tables import stdout_console

    if args.list:
        for scenario in SCENARIOS.values():
            note = " (vLLM only)" if scenario.needs_vllm else ""
            sys.stdout.write(f"{scenario.name:22} {scenario.what}{note}\n")
        return OK
    names = args.only.split(",") if args.only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise BenchError(f"--only: no scenario {unknown[0]!r}; --list shows them")
    chosen = [SCENARIOS[x] for x in names if args.engine != "fake" or not SCENARIOS[x].needs_vllm]
    if not chosen:
        raise BenchError("--only: these scenarios need --engine vllm")
    settings = _settings(ChaosSettings, args, changes=tuple(changes_from(args).items()))
    directory = args.run_dir or Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    rows: list[Row] = []

    async def work(progress: Progress) -> None:
        async with aclosing(run_matrix(settings, chosen, directory, progress)) as found:  # type: ignore[type-var]
            async for row in found:
                rows.append(row)
                notes = "; ".join([*row.notes, *(f"{k} x{n}" for k, n in row.fallbacks.items())])
                progress.say(f"{'ok' if row.passed else 'FAILED':6} {row.fault}: {notes}")
                for text in (*row.errors, *row.left):
                    progress.say(f"       {text}")

    is_interrupted = False
    with Progress() as progress:
        progress.say(f"logs are in {directory}")
        try:
            run_async(work(progress))
        except KeyboardInterrupt:
            is_interrupted = True
    if args.json:
        whole = {"rows": [row.to_json() for row in rows], "passed": all(x.passed for x in rows)}
        sys.stdout.write(json.dumps(whole, indent=1) + "\n")
    else:
        print_rows(stdout_console(), rows)
    if is_interrupted:
        return INTERRUPTED
    return OK if all(row.passed for row in rows) else FAILED


# -- simulate and plan


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options that simulate and plan share."""
    add = parser.add_argument
    add("--trace", default="chat", metavar="TRACE", help=_TRACE)
    add("--tokens-in", type=_count, metavar="N", help="mean, instead of a trace")
    add("--tokens-out", type=_count, default=200, metavar="N", help="mean (200)")
    _add_shape(parser)
    add(
        "--rate", dest="rate_per_s", type=_positive, default=4.0, metavar="R", help="requests/s (4)"
    )
    add("--users", type=_count, default=0, metavar="N", help="who wait for answers, instead")
    add(
        "--think-time",
        dest="think_s",
        type=_positive,
        default=0.0,
        metavar="S",
        help="between their requests",
    )
    add("--requests", type=_count, default=400, metavar="N", help="to send (400)")
    add("--max-num-seqs", type=_count, default=64, metavar="N", help="(64)")
    add(
        "--blocks", dest="total_blocks", type=_count, default=8192, metavar="N", help="of KV (8192)"
    )
    add("--slo-ttft", type=_positive, default=1000.0, metavar="MS", help="limit (1000)")
    add("--slo-tpot", type=_positive, default=100.0, metavar="MS", help="limit (100)")
    add("--costs", type=Path, metavar="FILE", help="step costs, as --calibrate has")
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure the step costs of --model on this machine, and write them to FILE",
    )
    add("--seed", type=_whole, default=0)
    add("--json", action="store_true", help="print the result as JSON")
    add_config_options(parser, {"--policy": "router.policy", "--model": "worker.model"})


def _add_simulate(commands: _Parsers) -> argparse.ArgumentParser:
    simulate = _command(
        commands,
        "simulate",
        "serve a trace with the real router and fake engines in virtual time",
        "The router's own code serves a trace with engines whose steps take what "
        "--costs says. Exit status: 0, 2 for wrong options.",
    )
    add = simulate.add_argument
    add("--prefill", type=_whole, default=1, metavar="N", help="workers (1)")
    add("--decode", type=_whole, default=1, metavar="N", help="workers (1)")
    add("--aggregated", type=_whole, default=0, metavar="N", help="workers (0)")
    _add_load(simulate)
    return simulate


def _add_plan(commands: _Parsers) -> argparse.ArgumentParser:
    plan = _command(
        commands,
        "plan",
        "find how many workers a load needs",
        "Search by simulation for the fewest workers that keep the SLOs, with and "
        "without disaggregation. Exit status: 0, 2 for wrong options or SLOs that cannot be kept.",
    )
    plan.add_argument(
        "--target", type=_positive, default=0.99, metavar="SHARE", help="of requests (0.99)"
    )
    plan.add_argument("--price", type=_positive, metavar="X", help="of a worker's hour")
    _add_load(plan)
    return plan


def _load_of(args: argparse.Namespace, progress: Progress, **workers: int) -> tuple[Any, ...]:
    """Return setup, router configuration, trace and shape. Raises BenchError, ConfigError."""
    import json
    from dataclasses import asdict

    from benchmarks.replay import write_text
    from benchmarks.simulate import Costs, Setup, calibrate, drawn_trace
    from benchmarks.traces import load_trace
    from benchmarks.workload import Shape
    from pdserve.config import load_config, to_mapping

    slo_s = {"ttft": args.slo_ttft / 1000, "tpot": args.slo_tpot / 1000}
    common = {f"router.slo.{name}_s": limit for name, limit in slo_s.items()} | changes_from(args)
    config = load_config(args.config, {"router.max_running_requests": 1 << 20, **common})
    costs = Costs() if args.costs is None else Costs.read(args.costs)
    if args.calibrate is not None:
        one = {"up.prefill": 1, "up.decode": 1, "router.policy": "least_loaded"}
        ports = {"router.http_port": 0, "router.grpc_port": 0, "router.slo.reject_factor": 0.0}
        real = load_config(args.config, {**common, **one, **ports})
        costs = run_async(calibrate(to_mapping(real), progress))
        write_text(args.calibrate, json.dumps(asdict(costs), indent=1) + "\n")
    setup = _settings(Setup, args, costs=costs, slo_s=slo_s, **workers)
    if args.tokens_in is not None:
        size = {"requests": args.requests, "seed": args.seed}
        trace = drawn_trace(args.tokens_in, args.tokens_out, **size)
    else:
        trace = load_trace(args.trace)
    shape = _settings(Shape, args)
    return setup, config.router, trace, shape


def _simulate(args: argparse.Namespace) -> int:
    import json

    from benchmarks.progress import Progress
    from benchmarks.report.tables import render_replay, stdout_console
    from benchmarks.simulate import simulate

    with Progress() as progress:
        workers = {x: getattr(args, x) for x in ("prefill", "decode", "aggregated")}
        load = _load_of(args, progress, **workers)
        progress.step("simulating")
        result = simulate(*load)
    if args.json:
        sys.stdout.write(json.dumps(result.to_json(with_records=False), indent=2) + "\n")
    else:
        render_replay(result, stdout_console())
    return OK


def _plan(args: argparse.Namespace) -> int:
    import json

    from benchmarks.plan import Planner, plan_rows
    from benchmarks.progress import Progress
    from benchmarks.replay import jsonable
    from benchmarks.report.tables import stdout_console
    from benchmarks.runner import print_table

    with Progress() as progress:
        setup, config, trace, shape = _load_of(args, progress)
        planner = Planner(setup, config, trace, shape, args.target, args.price, progress)
        plans = planner.plans()
    if args.json:
        sys.stdout.write(json.dumps({"plans": jsonable(plans)}, indent=2) + "\n")
        return OK
    columns = ["service", "workers", "kept", "requests/s", "TTFT p99, ms", "TPOT p99, ms"]
    print_table(stdout_console(), [*columns, "cost per million tokens out"], plan_rows(plans))
    return OK


# -- values of options


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _whole(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
    return int(text)


def _count(text: str) -> int:
    return _whole(text, 1)


def _fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor such as 1/8 or 0.5")
    return value


def _slo(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = part.partition("=")
        if name not in SLO_METRICS:
            known = ", ".join(SLO_METRICS)
            raise argparse.ArgumentTypeError(f"unknown metric {name!r}; known are {known}")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        for unit, factor in (("ms", 0.001), ("s", 1.0)):
            if limit.endswith(unit):
                value = _number(limit.removesuffix(unit))
                if math.isfinite(value) and value > 0:
                    found[name] = value * factor
                    break
        if name not in found:
            raise argparse.ArgumentTypeError(
                f"{part}: give a time above 0 with its unit, such as 500ms or 0.5s"
            )
    return found
