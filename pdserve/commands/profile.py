"""`pdserve profile`."""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.commands.options import DEFAULT_GRPC, add_dial_options, dialer_from
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pdserve.commands.options import Subparsers
    from pdserve.profiling.document import Profile, Sample


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "profile",
        help="measure a running service and write what its steps cost to a file",
        description="Ask a grid of prompt lengths and concurrency of a running service, best while "
        "nobody else uses it, and write every sample, the step costs that its router has fitted "
        "and the engines' settings to a JSON file.",
    )
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT",
        help="the router's gRPC address (default: %(default)s)",
    )
    parser.add_argument("--model", default="", help="model, where several are served")
    parser.add_argument(
        "--prompts",
        type=_counts,
        default=(32, 128, 512, 1024),
        metavar="N,...",
        help="prompt lengths in tokens (default: 32,128,512,1024)",
    )
    parser.add_argument(
        "--concurrency",
        type=_counts,
        default=(1, 4, 8),
        metavar="N,...",
        help="requests at a time (default: 1,4,8)",
    )
    parser.add_argument(
        "--output-tokens", type=int, default=32, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="times each is done (default: 2)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="deadline of each request (default: %(default)g)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), help="file (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the profile in place of words")
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _run(args: argparse.Namespace) -> int:
    from pdserve.profiling.measure import Grid, Service, measure

    counts = (*args.prompts, *args.concurrency, args.rounds)
    if min(counts) < 1 or args.output_tokens < 3:
        raise ConfigError("counts must be at least 1, and output tokens at least 3")
    grid = Grid(args.prompts, args.concurrency, args.output_tokens, args.rounds)
    service = Service(args.grpc, args.model, dialer_from(args), args.timeout)
    profile = asyncio.run(measure(service, grid, _tell))
    try:
        args.out.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {args.out}: {error}", field="out") from error
    sys.stdout.write(profile.to_json() if args.json else _summary(profile, args.out))
    return 0


def _tell(done: int, count: int, samples: Sequence[Sample]) -> None:
    first = samples[0]
    ttft_ms = 1e3 * statistics.median(x.ttft_s for x in samples)
    tpot_ms = 1e3 * statistics.median(x.tpot_s for x in samples)
    sys.stderr.write(
        f"{done:>3}/{count}  {first.prompt_tokens:>6} prompt tokens, {first.concurrency:>3} at a "
        f"time: first token {ttft_ms:.0f} ms, then {tpot_ms:.1f} ms a token\n"
    )


def _summary(profile: Profile, path: Path) -> str:
    lines = []
    for worker in profile.workers:
        steps = worker.steps
        if steps is None:
            lines.append(f"{worker.worker_id} ({worker.role}): nothing was measured")
            continue
        base, prompt, _, request, context = steps.coefficients
        lines.append(
            f"{worker.worker_id} ({worker.role}): a step {1e3 * base:.2f} ms, 1000 prompt tokens "
            f"{1e3 * prompt:.1f} ms, a decoding request {1e2 * request:.3f} ms, 10000 tokens of "
            f"context {1e3 * context:.2f} ms; off by {steps.error:.0%}"
        )
    return "\n".join([*lines, f"written to {path}", ""])
