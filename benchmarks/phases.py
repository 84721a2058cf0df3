"""Where prefill and decode hurt each other on one engine, and what it brings to part them:

    python -m benchmarks.large_model DIR
    python -m benchmarks.phases --model DIR [--only SET] [options of pdserve bench compare ...]

Three comparisons on a model large enough for a long prompt to hold up others' tokens: gaps between
tokens under `chat` with its long prompts left long, and the highest rate within the limits on
`chat` and on `longchat`, vLLM's own P/D beside it. Options that it does not know go to every
comparison, after its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.compare.cli import EXIT_INVALID, EXIT_OK
from benchmarks.compare.series import compare_all, invalid, refusing
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import capacity_text, ratio_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.summary import ArmSummary

_PROG: Final = "python -m benchmarks.phases"
OURS: Final = "1P1D"
_KV: Final = ("--kv-cache-mib", "1024", "--max-total-tokens", "4096")
_CHAT: Final = ("--trace", "chat", "--scale-lengths", "1/2", *_KV)
_LONGCHAT: Final = ("--trace", "longchat", "--scale-lengths", "1/16", *_KV)
_LIMITS: Final = ("--slo-ttft", "6000", "--slo-tpot", "120")
_SWEEP: Final = ("--rounds", "0", "--sweep", "6", "--requests", "12", "--probe-seconds", "40")
_ALL: Final = ("--arms", f"{OURS},2A,nixl", "--baseline", "2A")

SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "gaps": (
        *("--arms", f"{OURS},2A", *_CHAT, "--rate", "0.3", "--requests", "15", "--rounds", "5"),
        *_LIMITS,
    ),
    "chat": (*_ALL, *_CHAT, "--rate", "0.4", *_SWEEP, *_LIMITS),
    "longchat": (*_ALL, *_LONGCHAT, "--rate", "0.4", *_SWEEP, *_LIMITS),
}
"""The options of `pdserve bench compare` for each."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for wrong options, 3 if a comparison was invalid."""
    parser = argparse.ArgumentParser(
        prog=_PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="what large_model made")
    parser.add_argument("--only", choices=list(SETS), help="this comparison alone")
    parser.add_argument(
        "--out", type=Path, default=Path("build/phases"), metavar="DIR", help="(%(default)s)"
    )
    options, more = parser.parse_known_args(argv)
    return refusing(_PROG, lambda: _run(options, more))


def _run(options: argparse.Namespace, more: Sequence[str]) -> int:
    names = [options.only] if options.only else list(SETS)
    series = {name: [*SETS[name], "--model", options.model, *more] for name in names}
    results = compare_all(_PROG, series, options.out)
    for name, result in results.items():
        sys.stdout.write("".join(f"{name}: {line}\n" for line in said(result)))
    if spoilt := invalid(results):
        sys.stdout.write(f"INVALID, for the reasons above: {', '.join(spoilt)}\n")
        return EXIT_INVALID
    return EXIT_OK


def said(result: CompareResult) -> list[str]:
    """What a comparison says of ours beside the others, a line for each thing."""
    summary = summarise_compare(result)
    arms = {arm.name: arm for arm in summary.arms}
    ours, lines = arms.pop(OURS), []
    for key, label in (("itl_p99", "ITL p99"), ("icl_p99", "ICL p99"), ("goodput", "goodput")):
        if key in ours.ratios and (key != "icl_p99" or not summary.has_itl):
            lines.append(f"{label}, {OURS} / {summary.baseline}: {ratio_text(ours.ratios[key])}")
    rates = {name: _passed(arm) for name, arm in arms.items()}
    own = _passed(ours)
    if own is not None and any(rates.values()):
        best = max(rates, key=lambda name: rates[name] or 0.0)
        quotient = own / (rates[best] or 1.0)
        lines.append(
            f"highest rate within the limits, {OURS} / {best}, the best other: {quotient:.2f}"
        )
    for name, arm in {OURS: ours, **arms}.items():
        if arm.sweep is not None:
            lines.append(f"{name}: {capacity_text(arm.sweep)} requests/s")
    return lines


def _passed(arm: ArmSummary) -> float | None:
    return None if arm.sweep is None else arm.sweep.found.passed


if __name__ == "__main__":
    sys.exit(main())
