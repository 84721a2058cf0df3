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
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.compare.cli import EXIT_INVALID, EXIT_OK
from benchmarks.compare.series import compare_all, invalid, refusing
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import capacity_text, ratio_text
from benchmarks.standard.readme import between, table
from benchmarks.standard.sets import ROOT, StandardResult, read_standard, write_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.summary import ArmSummary

_PROG: Final = "python -m benchmarks.phases"
BEGIN: Final = "<!-- made by benchmarks.phases: begin -->"
END: Final = "<!-- made by benchmarks.phases: end -->"
OURS: Final = "1P1D"
_KV: Final = ("--kv-cache-mib", "1024", "--max-total-tokens", "4096")
_CHAT: Final = ("--trace", "chat", "--scale-lengths", "1/2", *_KV)
_LONGCHAT: Final = ("--trace", "longchat", "--scale-lengths", "1/16", *_KV)
_LIMITS: Final = ("--slo-ttft", "6000", "--slo-tpot", "120")
# The longest prompts of `longchat` take more than 6 s even where nobody else asks.
_LONG_LIMITS: Final = ("--slo-ttft", "12000", "--slo-tpot", "120")
_SWEEP: Final = ("--rounds", "0", "--sweep", "6", "--requests", "12", "--probe-seconds", "40")
_ALL: Final = ("--arms", f"{OURS},2A,nixl", "--baseline", "2A")

SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "gaps": (
        *("--arms", f"{OURS},2A", *_CHAT, "--rate", "0.8", "--requests", "40", "--rounds", "5"),
        *_LIMITS,
    ),
    "chat": (*_ALL, *_CHAT, "--rate", "0.4", *_SWEEP, *_LIMITS),
    "longchat": (*_ALL, *_LONGCHAT, "--rate", "0.4", *_SWEEP, *_LONG_LIMITS),
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
    parser.add_argument("--keep", action="store_true", help="keep it and refresh the README")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
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
    if options.keep:
        keep(results, options.root, Path(options.model))
    return EXIT_OK


def keep(results: Mapping[str, CompareResult], root: Path, model: Path) -> None:
    """Put these in the place of the kept ones of the same names, and refresh the README. Raises
    :class:`BenchError`."""
    path = kept_path(root)
    older = read_standard(path).results if path.exists() else {}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    run = StandardResult(created, {x: y for x, y in {**older, **results}.items() if x in SETS})
    write_to(run, path, but={str(model): model.name})
    readme = root / "README.md"
    readme.write_text(with_phases(readme.read_text(encoding="utf-8"), run), encoding="utf-8")
    sys.stderr.write(f"kept in {path.relative_to(root)}\n")


def kept_path(root: Path) -> Path:
    """Of the file that keeps the last run of each comparison."""
    return root / "benchmarks" / "results" / "phases.json"


def with_phases(readme: str, run: StandardResult | None) -> str:
    """``readme`` with the table of these comparisons between the markers."""
    return between(readme, BEGIN, END, table(run))


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
