"""The commands of `pdserve bench`. Each takes parsed options and returns an exit status."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import uvloop

from benchmarks.chaos.matrix import ChaosSettings, print_rows, run_matrix
from benchmarks.chaos.scenarios import SCENARIOS
from benchmarks.chaos.storms import STORMS
from benchmarks.client import GrpcTarget, HttpTarget
from benchmarks.compare.result import CompareResult, from_json, to_json
from benchmarks.compare.run import CompareSettings, run_compare
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.variants import config_changes, parse_variants, share_cores
from benchmarks.compare.vllm_stack import check_programs, stack_config
from benchmarks.errors import FAILED, INTERRUPTED, INVALID, OK, BenchError
from benchmarks.progress import Progress
from benchmarks.replay import (
    SCHEMA,
    ReplayResult,
    ReplaySettings,
    jsonable,
    parse,
    read_json,
    run_replay,
    write_text,
)
from benchmarks.report.page import render_page
from benchmarks.report.tables import print_table, render_compare, render_replay
from benchmarks.simulate import Costs, Planner, Setup, drawn_trace
from benchmarks.simulate import simulate as run_simulation
from benchmarks.soak.run import SoakSettings, print_result, run_soak
from benchmarks.traces import load_trace
from benchmarks.workload import Shape
from pdserve.cli.options import (
    DEFAULT_URL,
    api_key_from,
    changes_from,
    dialer_from,
    http_tls_from,
)
from pdserve.config import load_config, to_mapping
from pdserve.process.gpus import is_cpu_build

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Callable, Coroutine

    from benchmarks.chaos.matrix import Row
    from benchmarks.chaos.scenarios import Scenario
    from benchmarks.compare.variants import Variant
    from benchmarks.traces import Trace
    from pdserve.config import RouterConfig

T = TypeVar("T")


def _settings(kind: type[T], args: argparse.Namespace, **more: Any) -> T:
    """Return a dataclass filled with the options of the same names, and with `more`."""
    given = {x.name: getattr(args, x.name) for x in fields(kind) if hasattr(args, x.name)}  # type: ignore[arg-type]
    return kind(**(given | more))


def _limits(args: argparse.Namespace) -> dict[str, float]:
    limits = {"ttft": args.slo_ttft, "tpot": args.slo_tpot}
    return {name: limit / 1000 for name, limit in limits.items() if limit is not None}


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _each(results: AsyncIterator[T], use: Callable[[T], None]) -> bool:
    """Call `use` with each result as it arrives. Return True if Ctrl-C interrupted this."""

    async def work() -> None:
        async with aclosing(results):  # type: ignore[type-var]
            async for result in results:
                use(result)

    try:
        run_async(work())
    except KeyboardInterrupt:
        return True
    return False


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


# -- replay and report


def replay(args: argparse.Namespace) -> int:
    if args.out is not None and not args.out.parent.is_dir():
        raise BenchError(f"--out {args.out}: there is no directory {args.out.parent}")
    if args.url and args.grpc:
        raise BenchError("--grpc is not allowed with --url")
    settings = _settings(ReplaySettings, args, shape=_settings(Shape, args), slo_s=_limits(args))

    async def work(progress: Progress) -> ReplayResult:
        key, url = api_key_from(args), args.url or DEFAULT_URL
        if args.grpc is not None:
            target: GrpcTarget | HttpTarget = GrpcTarget(args.grpc, dialer_from(args), key)
        else:
            target = HttpTarget(url, key, http_tls_from(args))
        try:
            return await run_replay(settings, target, progress)
        finally:
            await target.aclose()

    with Progress() as progress:
        result: ReplayResult = run_async(work(progress))
    if args.out is not None:
        write_text(args.out, json.dumps(result.to_json(), separators=(",", ":")) + "\n")
    _print_replay(result, as_json=args.json)
    return OK if result.summary().ok == len(result.records) else FAILED


def _print_replay(result: ReplayResult, *, as_json: bool) -> None:
    if as_json:
        _print_json(result.to_json(with_records=False))
    else:
        render_replay(result)


def report(args: argparse.Namespace) -> int:
    path = args.result / "result.json" if args.result.is_dir() else args.result
    whole = read_json(path)
    if isinstance(whole, dict) and whole.get("schema") == SCHEMA:
        if args.html is not None:
            raise BenchError(f"{args.result}: a single replay has no HTML report")
        _print_replay(parse(whole, ReplayResult), as_json=args.json)
        return OK
    try:
        result = from_json(whole)
    except BenchError as error:
        raise BenchError(f"{args.result}: {error}") from None
    if args.html is not None:
        write_text(args.html, render_page(result))
    return _print_compare(result, as_json=args.json)


# -- compare


def compare(args: argparse.Namespace) -> int:
    settings, variants = prepare(args)
    out: Path | None = args.resume or args.out
    before = from_json(read_json(args.resume / "result.json")) if args.resume else None
    key, tls = api_key_from(args), http_tls_from(args)
    kept: list[CompareResult] = []

    def connect(url: str) -> HttpTarget:
        return HttpTarget(url, key, tls)

    def keep(result: CompareResult) -> None:
        kept[:] = [result]
        if out is not None:
            text = to_json(result, summarise_compare(result).to_json())
            write_text(out / "result.json", text)
            write_text(out / "report.html", render_page(result))

    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made, Progress() as progress:
        logs = out / "logs" if out else Path(made)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--out {out}: {error.strerror or error}") from None
        results = run_compare(settings, variants, connect, progress, directory=logs, before=before)
        is_interrupted = _each(results, keep)
    if not kept:
        raise KeyboardInterrupt
    if out is not None:
        sys.stderr.write(f"{out / 'result.json'}\n{out / 'report.html'}\n")
    status = _print_compare(kept[0], as_json=args.json)
    if is_interrupted:
        sys.stderr.write("pdserve bench: interrupted; these are the rounds so far\n")
        return INTERRUPTED
    return status


def _print_compare(result: CompareResult, *, as_json: bool) -> int:
    summary = summarise_compare(result)
    if as_json:
        _print_json(summary.to_json())
    else:
        render_compare(result, summary)
    return INVALID if summary.validity.invalid else OK


def prepare(args: argparse.Namespace) -> tuple[CompareSettings, list[Variant]]:
    """Check all options before anything is started. Raises BenchError and ConfigError."""
    default = "" if len(args.endpoints) > 1 else "1P1D,2A"
    texts = [x for x in (args.arms or default).split(",") if x] + args.endpoints
    variants = parse_variants(texts, args.arm_set)
    names = [variant.name for variant in variants]
    baseline = args.baseline or names[-1]
    if baseline not in names:
        raise BenchError(f"--baseline {baseline} is not a variant; there are {', '.join(names)}")
    slo_s = _limits(args)
    if args.sweep and not slo_s:
        raise BenchError("--sweep needs --slo-ttft or --slo-tpot")
    if not args.rounds and not args.sweep:
        raise BenchError("--rounds 0 measures nothing without --sweep")
    settings = _settings(
        CompareSettings,
        args,
        probes=args.sweep or 0,
        slo_s=slo_s,
        baseline=baseline,
        # Other servers are measured over HTTP. If there is one, all variants must be, to be
        # comparable.
        api="http" if any(variant.url or variant.is_vllm for variant in variants) else "grpc",
        differ=tuple(x for x in args.differ.split(",") if x),
    )
    slo: dict[str, object] = {f"router.slo.{name}_s": x for name, x in slo_s.items()}
    # Without SLOs, turn off the rejection of requests with a predicted latency above the default.
    slo["router.slo.reject_factor"] = 1.0 if slo else 0.0
    common = slo | changes_from(args)
    engine = load_config(args.config, common).worker.engine
    for name in (variant.name for variant in variants if variant.is_vllm):
        if engine != "vllm":
            raise BenchError(f"--engine {engine}: {name} serves with vLLM")
        check_programs(name)
    local = sum(not variant.url for variant in variants)
    kv_cache_bytes = None if args.kv_cache_mib is None else args.kv_cache_mib << 20
    if kv_cache_bytes is None and local > 1 and engine == "vllm" and is_cpu_build():
        # By default each engine takes a share of the whole machine's memory, but the engines of all
        # variants run at the same time.
        kv_cache_bytes = psutil.virtual_memory().total // 4 // local
    available = sorted(os.sched_getaffinity(0))
    cores = share_cores(variants, len(available))

    def configured(variant: Variant) -> Variant:
        if variant.url:
            return variant
        own = config_changes(variant, cores, kv_cache_bytes, str(engine))
        config = load_config(args.config, {**common, **own})
        if variant.is_vllm:
            counts = (variant.prefill, variant.decode, variant.aggregated)
            return replace(variant, stack=stack_config(counts, available[:cores], config.worker))
        return replace(variant, config=to_mapping(config))

    return settings, [configured(variant) for variant in variants]


# -- chaos


def chaos(args: argparse.Namespace) -> int:
    if args.list:
        for scenario in (*SCENARIOS.values(), *STORMS.values()):
            notes = ["vLLM only"] if scenario.needs_vllm else []
            notes += [f"--models with {', '.join(scenario.files)}"] if scenario.files else []
            note = f" ({'; '.join(notes)})" if notes else ""
            sys.stdout.write(f"{scenario.name:22} {scenario.what}{note}\n")
        return OK
    settings = _settings(ChaosSettings, args, changes=tuple(changes_from(args).items()))
    chosen, not_run = _chosen(args.only, settings)
    directory = args.run_dir or Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    rows: list[Row] = []
    with Progress() as progress:
        progress.say(f"logs are in {directory}")
        for name, why in not_run.items():
            progress.say(f"not run {name}: {why}")

        def keep(row: Row) -> None:
            rows.append(row)
            counts = [f"{k} x{n}" for k, n in (*row.aborts.items(), *row.fallbacks.items())]
            notes = "; ".join([*row.notes, *counts])
            progress.say(f"{'ok' if row.passed else 'FAILED':6} {row.fault}: {notes}")
            told = [f"{name} died" for name in row.deaths]
            told += [f"capsule: {path}" for path in row.capsules]
            for text in (*row.errors, *row.left, *told):
                progress.say(f"       {text}")

        is_interrupted = _each(run_matrix(settings, chosen, directory, progress), keep)
    passed = all(row.passed for row in rows)
    if args.json:
        found = [row.to_json() for row in rows]
        _print_json({"rows": found, "not_run": not_run, "passed": passed})
    else:
        print_rows(rows)
    if is_interrupted:
        return INTERRUPTED
    return OK if passed else FAILED


def _chosen(only: str | None, settings: ChaosSettings) -> tuple[list[Scenario], dict[str, str]]:
    """Return the scenarios of --only, and why others of them cannot run. Raises BenchError if none
    can."""
    known, chosen, not_run = SCENARIOS | STORMS, [], {}
    for word in only.split(",") if only else SCENARIOS:
        for name in STORMS if word == "storms" else (word,):
            if name not in known:
                raise BenchError(f"--only: no scenario {name!r}; --list shows them")
            scenario, why = known[name], settings.missing(known[name])
            if scenario.needs_vllm and settings.engine == "fake":
                why = "needs --engine vllm"
            if why:
                not_run[name] = why
            else:
                chosen.append(scenario)
    if not chosen:
        raise BenchError(f"--only: no scenario can run ({next(iter(not_run.values()))})")
    return chosen, not_run


# -- soak


def soak(args: argparse.Namespace) -> int:
    settings = _settings(SoakSettings, args, changes=tuple(changes_from(args).items()))
    directory = args.run_dir or Path(tempfile.mkdtemp(prefix="pdserve-soak-"))
    with Progress() as progress:
        progress.say(f"logs are in {directory}")
        result = run_async(run_soak(settings, directory, progress))
    if args.json:
        _print_json(result.to_json())
    else:
        print_result(result)
    return OK if result.passed else FAILED


# -- simulate and plan


def _load_of(args: argparse.Namespace) -> tuple[Setup, RouterConfig, Trace, Shape]:
    """Return setup, router configuration, trace and shape. Raises BenchError, ConfigError."""
    slo_s = _limits(args)
    common = {f"router.slo.{name}_s": limit for name, limit in slo_s.items()} | changes_from(args)
    config = load_config(args.config, {"router.queue.max_running_requests": 1 << 20, **common})
    costs = Costs() if args.costs is None else Costs.read(args.costs)
    setup = _settings(Setup, args, costs=costs, slo_s=slo_s, retention=config.worker.retention)
    if args.tokens_in is not None:
        size = {"requests": args.requests, "seed": args.seed}
        trace = drawn_trace(args.tokens_in, args.tokens_out, **size)
    else:
        trace = load_trace(args.trace)
    return setup, config.router, trace, _settings(Shape, args)


def simulate(args: argparse.Namespace) -> int:
    setup, config, trace, shape = _load_of(args)
    with Progress() as progress:
        progress.step("simulating")
        result = run_simulation(setup, config, trace, shape, progress)
    _print_replay(result, as_json=args.json)
    if not args.json and "decoded_away" in result.target:
        rows = [[f"{result.target[x]:.1%}" for x in ("kv_between_regions", "decoded_away")]]
        print_table(["KV between regions", "decoded away from the router"], rows)
    return OK


def plan(args: argparse.Namespace) -> int:
    setup, config, trace, shape = _load_of(args)
    with Progress() as progress:
        planner = Planner(setup, config, trace, shape, args.target, args.price, progress)
        plans = planner.plans()
    if args.json:
        _print_json({"plans": jsonable(plans)})
        return OK
    columns = ["service", "workers", "kept", "requests/s", "TTFT p99, ms", "TPOT p99, ms"]
    rows = [plan.row() for plan in plans]
    print_table([*columns, "cost per million tokens out"], rows)
    return OK
