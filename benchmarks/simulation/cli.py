"""`pdserve simulate`. Only the parser is made here; the rest is imported when it runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from benchmarks.options import TRACE_HELP, fraction, positive_float, positive_int, whole_number
from pdserve.commands.options import add_config_options, changes_from, config_from

if TYPE_CHECKING:
    import argparse

    from benchmarks.simulation.arrivals import Arrivals, Load
    from benchmarks.simulation.run import Finished, Setup
    from benchmarks.simulation.service import RouterSettings
    from benchmarks.simulation.service_model import ServiceModel
    from pdserve.commands.options import Subparsers

PROFILE_HELP = "what `pdserve profile` wrote, or demo: the demo model on two cores (default: demo)"
_SEATS_KEY = "router.max_running_requests"


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate",
        help="serve a trace on modelled workers, on a virtual clock",
        description="The router's own placement, admission and role code over modelled workers, of "
        "which there may be thousands, on a virtual clock. The same options give the same result.",
    )
    parser.set_defaults(handler=_run)
    add_pools(parser)
    add_load(parser)
    add_service(parser)
    parser.add_argument(
        "--policies", metavar="A,B", help="these beside each other, on every trace of --trace A,B"
    )
    parser.add_argument(
        "--retries",
        type=whole_number,
        default=0,
        metavar="N",
        help="who is refused comes again when told, up to so often (default: 0)",
    )
    parser.add_argument(
        "--flip-time",
        type=positive_float,
        default=0.5,
        metavar="SECONDS",
        help="of an empty worker that changes its role, with router.roles.auto (default: 0.5)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def add_pools(parser: argparse.ArgumentParser) -> None:
    """Options that say how many workers there are."""
    pools = parser.add_argument_group("workers")
    for role, what in (
        ("prefill", "prefill workers"),
        ("decode", "decode workers"),
        ("aggregated", "workers that do both"),
    ):
        pools.add_argument(
            f"--{role}", type=whole_number, metavar="N", help=f"{what} (default: 1P1D)"
        )


def add_load(parser: argparse.ArgumentParser) -> None:
    """Options that say what is asked."""
    load = parser.add_argument_group("requests")
    load.add_argument(
        "--trace",
        default="chat",
        metavar="TRACE",
        help=f"{TRACE_HELP}; A+B mixes two, A,B is one after the other",
    )
    load.add_argument(
        "--rate", type=positive_float, metavar="N", help="requests a second (default: the trace's)"
    )
    load.add_argument(
        "--duration",
        type=positive_float,
        default=60.0,
        metavar="SECONDS",
        help="in which requests come, of each of A,B (default: %(default)g)",
    )
    load.add_argument(
        "--arrivals",
        choices=("trace", "poisson"),
        default="trace",
        help="when they come: as in the trace, or at random (default: trace)",
    )
    load.add_argument(
        "--scale-lengths", type=fraction, default=Fraction(1), metavar="F", help="such as 1/8"
    )
    load.add_argument("--max-output-tokens", type=positive_int, metavar="N", help="cut outputs")
    load.add_argument(
        "--max-total-tokens", type=positive_int, metavar="N", help="drop longer requests"
    )
    load.add_argument("--seed", type=whole_number, default=0, help="default: 0")


def add_service(parser: argparse.ArgumentParser) -> None:
    """Options that say how it is served."""
    parser.add_argument("--profile", default="demo", metavar="FILE", help=PROFILE_HELP)
    add_config_options(
        parser,
        {
            "--policy": "router.policy",
            "--slo-ttft": "router.slo.ttft_s",
            "--slo-tpot": "router.slo.tpot_s",
        },
    )


def settings_from(args: argparse.Namespace) -> RouterSettings:
    """The router's configuration; as many requests run as there are seats, unless it says."""
    from benchmarks.simulation.service import RouterSettings

    told = args.config is not None or _SEATS_KEY in changes_from(args)
    return RouterSettings(config_from(args).router, as_many_as_seats=not told)


def loads_from(args: argparse.Namespace) -> list[tuple[str, Load]]:
    """What is asked for: of each of the traces that are named by themselves."""
    load = load_from(args)
    return [(x, replace(load, traces=tuple(x.split("+")))) for x in args.trace.split(",")]


def model_from(args: argparse.Namespace) -> ServiceModel:
    """Raises ConfigError, BenchError."""
    from benchmarks.simulation.profiles import read_profile
    from benchmarks.simulation.service_model import of_profile

    return of_profile(read_profile(args.profile))


def load_from(args: argparse.Namespace) -> Load:
    """What is asked for."""
    from benchmarks.simulation.arrivals import Load
    from benchmarks.workload import Shape

    shape = Shape(
        scale_lengths=args.scale_lengths,
        max_output_tokens=args.max_output_tokens,
        max_total_tokens=args.max_total_tokens,
    )
    return Load(
        traces=tuple(args.trace.split("+")),
        rate_per_s=args.rate,
        duration_s=args.duration,
        arrivals=args.arrivals,
        shape=shape,
        seed=args.seed,
    )


def _run(args: argparse.Namespace) -> int:
    from benchmarks.errors import BenchError
    from benchmarks.simulation.arrivals import one_after_another
    from benchmarks.simulation.run import Setup
    from benchmarks.simulation.service import Workers

    counts = {role: getattr(args, role) or 0 for role in ("prefill", "decode", "aggregated")}
    workers = Workers(**counts) if any(counts.values()) else Workers(1, 1)
    try:
        settings = replace(settings_from(args), flip_s=args.flip_time)
        setup = Setup(model_from(args), workers, settings, args.retries)
        if args.policies is not None:
            return _compare(args, setup)
        arrivals = one_after_another([load for _, load in loads_from(args)])
        finished = _simulate(setup, arrivals)
    except BenchError as error:
        sys.stderr.write(f"pdserve: {error}\n")
        return 2
    _show(args, setup, arrivals, finished)
    return 0


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _compare(args: argparse.Namespace, setup: Setup) -> int:
    import json

    from benchmarks.errors import BenchError
    from benchmarks.simulation.arrivals import arrivals_of
    from benchmarks.simulation.policies import compare, show
    from pdserve.config import POLICIES

    policies = args.policies.split(",")
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise BenchError(f"no policy {unknown[0]!r}; there are {', '.join(POLICIES)}")
    loads = [(trace, arrivals_of(load)) for trace, load in loads_from(args)]
    found = compare(setup, policies, loads, _tell)
    if args.json:
        sys.stdout.write(json.dumps([x.plain() for x in found], indent=2, sort_keys=True) + "\n")
    else:
        show(found)
    return 0


def _simulate(setup: Setup, arrivals: Arrivals) -> Finished:
    from benchmarks.simulation.run import simulate
    from benchmarks.simulation.table import Ticker

    with Ticker(f"{setup.workers} {setup.settings.config.policy}") as ticker:
        return simulate(setup, arrivals, tell=ticker.tell)


def _show(args: argparse.Namespace, setup: Setup, arrivals: Arrivals, finished: Finished) -> None:
    import json

    from benchmarks.simulation.table import show, warnings

    notes = [*arrivals.notes, *warnings(setup, arrivals, finished)]
    if args.json:
        told = {**finished.summary.plain(), "notes": notes}
        sys.stdout.write(json.dumps(told, indent=2, sort_keys=True) + "\n")
    else:
        show(finished.summary, notes)
