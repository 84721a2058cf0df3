"""`pdserve plan`. Only the parser is made here; the rest is imported when it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.options import TRACE_HELP, positive_float, positive_int, whole_number
from benchmarks.simulation.cli import add_service, model_from, settings_from

if TYPE_CHECKING:
    import argparse

    from benchmarks.simulation.capacity import Lengths
    from benchmarks.simulation.plan import Answer, Question
    from pdserve.commands.options import Subparsers

_DRAWN = 4096


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="how many workers a load needs, and what it costs",
        description="The fewest prefill and decode workers, and the fewest that do both, with "
        "which a load keeps its SLOs: by arithmetic from a profile, then by simulation.",
    )
    parser.set_defaults(handler=_run)
    load = parser.add_argument_group("load")
    who = load.add_mutually_exclusive_group(required=True)
    who.add_argument("--users", type=positive_int, metavar="N", help="who ask one after another")
    who.add_argument("--rate", type=positive_float, metavar="N", help="requests a second")
    load.add_argument(
        "--think-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="between a user's answer and next question, on average (default: 0)",
    )
    load.add_argument("--tokens-in", type=positive_int, metavar="N", help="mean prompt")
    load.add_argument("--tokens-out", type=positive_int, metavar="N", help="mean answer")
    load.add_argument("--trace", metavar="TRACE", help=f"lengths in place of means: {TRACE_HELP}")
    load.add_argument(
        "--target",
        type=positive_float,
        default=0.99,
        metavar="SHARE",
        help="of requests that keep both SLOs (default: 0.99)",
    )
    parser.add_argument(
        "--price", type=positive_float, default=1.0, metavar="N", help="of a worker's hour"
    )
    parser.add_argument("--price-prefill", type=positive_float, metavar="N", help="where another")
    parser.add_argument("--seed", type=whole_number, default=0, help="default: 0")
    add_service(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def _run(args: argparse.Namespace) -> int:
    from benchmarks.errors import BenchError

    try:
        question = _question(args)
        found = _answers(question)
    except BenchError as error:
        sys.stderr.write(f"pdserve: {error}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps(_plain(question, found), indent=2, sort_keys=True) + "\n")
    else:
        from benchmarks.simulation.plan_table import show

        show(question, found)
    return 0


def _question(args: argparse.Namespace) -> Question:
    from benchmarks.errors import BenchError
    from benchmarks.simulation.plan import Question

    if args.target > 1 or args.think_time < 0:
        raise BenchError("the target is a share up to 1, and time to think not below 0")
    settings = settings_from(args)
    # How many of each role is what is asked, and who is late then: nobody is refused for it.
    fixed = replace(
        settings.config,
        roles=replace(settings.config.roles, auto=False),
        slo=replace(settings.config.slo, refuse_beyond=0.0),
    )
    return Question(
        model=model_from(args),
        settings=replace(settings, config=fixed),
        lengths=_lengths(args),
        users=args.users or 0,
        think_s=args.think_time,
        rate_per_s=args.rate or 0.0,
        target=args.target,
        prefill_price=args.price_prefill or args.price,
        decode_price=args.price,
        seed=args.seed,
    )


def _lengths(args: argparse.Namespace) -> Lengths:
    from benchmarks.errors import BenchError
    from benchmarks.simulation.capacity import Lengths
    from benchmarks.simulation.users import pairs_around
    from benchmarks.trace import load_trace

    if args.trace is not None:
        rows = load_trace(args.trace).requests
        return Lengths([(row.input_tokens, row.output_tokens) for row in rows])
    if args.tokens_in is None or args.tokens_out is None:
        raise BenchError("give --tokens-in and --tokens-out, or a --trace")
    return Lengths(pairs_around(args.tokens_in, args.tokens_out, _DRAWN, args.seed))


def _answers(question: Question) -> list[Answer]:
    from benchmarks.simulation.plan import first_guess, plan

    def tell(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    apart, together, _ = first_guess(question)
    return [plan(question, guess, tell) for guess in (apart, together)]


def _plain(question: Question, found: list[Answer]) -> dict[str, Any]:
    from dataclasses import asdict

    from benchmarks.simulation.plan import first_guess

    apart, together, one = first_guess(question)
    return {
        "one_worker_saturates_at": asdict(one),
        "first_guess": {"apart": asdict(apart), "together": asdict(together)},
        "apart": found[0].plain(),
        "together": found[1].plain(),
    }
