"""`pdserve bench`: its options. What a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BAD_INPUT, FAILED, INTERRUPTED, BenchError, WarmupFailed
from pdserve.cli.options import DEFAULT_URL, add_command, add_config_options, add_dial_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _number(kind: Callable[[str], Any], least: float, what: str) -> Callable[[str], Any]:
    """Return a reader of numbers from `least` up (0.0: above it) and below infinity."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError, ZeroDivisionError):
            value = kind(text)
            if least <= value < math.inf and (value or isinstance(least, int)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return read


_positive = _number(float, 0.0, "a number above 0")
_fraction = _number(Fraction, 0.0, "a factor such as 1/8 or 0.5")
_whole = _number(int, 0, "a whole number from 0 up")
_count = _number(int, 1, "a whole number from 1 up")


def _few(text: str) -> Any:
    if text in "123456789" and len(text) == 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 9")


# Options: names, metavar, type, default, help. A metavar of "" is a flag, one of "+" repeats.

_Option = tuple[str, str, Any, Any, str]
_TRACE: Final[_Option] = (
    *("--trace", "TRACE", str, "chat"),
    "chat, code, longchat, agent, or the path of a file",
)
_SEED: Final[_Option] = ("--seed", "N", _whole, 0, "for prompts and the spread of arrivals")
_JSON: Final[_Option] = ("--json", "", None, False, "print the result as JSON")
_CUTS: Final[tuple[_Option, ...]] = (
    ("--max-output-tokens", "N", _count, None, "cut longer outputs"),
    ("--max-total-tokens", "N", _count, None, "drop longer requests"),
    ("--turns:max_turns", "N", _count, None, "end sessions after N turns"),
)
_LIMITS: Final[tuple[_Option, ...]] = (
    ("--slo-ttft", "MS", _positive, None, "limit; compare also configures routers with it"),
    ("--slo-tpot", "MS", _positive, None, "limit; compare also configures routers with it"),
)
_SHAPE: Final[tuple[_Option, ...]] = (
    ("--scale-lengths", "F", _fraction, Fraction(1), "multiply all lengths, such as 1/8"),
    *_CUTS,
)
_LOAD: Final[tuple[_Option, ...]] = (
    *(
        (f"--{role}-ranks", "N", _count, 1, f"workers in each data-parallel group of {role}")
        for role in ("prefill", "decode", "aggregated")
    ),
    _TRACE,
    ("--tokens-in", "N", _count, None, "mean, instead of a trace"),
    ("--tokens-out", "N", _count, 200, "mean, with --tokens-in"),
    *_SHAPE,
    ("--rate:rate_per_s", "R", _positive, 4.0, "requests/s"),
    ("--requests", "N", _count, 400, "to send"),
    ("--max-num-seqs", "N", _count, 64, "concurrent requests of a worker"),
    ("--blocks:total_blocks", "N", _count, 8192, "of KV in a worker"),
    ("--slo-ttft", "MS", _positive, 1000.0, "limit"),
    ("--slo-tpot", "MS", _positive, 100.0, "limit"),
    (
        "--costs",
        "FILE",
        Path,
        None,
        "step_s, prefill_s, decode_s, transfer_s, far_transfer_s as JSON, in seconds",
    ),
    _SEED,
    _JSON,
)
_WORKERS: Final[tuple[_Option, ...]] = (
    ("--prefill", "N", _whole, 1, "workers, or groups"),
    ("--decode", "N", _whole, 1, "workers, or groups"),
    ("--aggregated", "N", _whole, 0, "workers, or groups"),
)
_OPTIONS: Final[Mapping[str, tuple[_Option, ...]]] = {
    "replay": (
        ("--url", "URL,...", str, None, f"OpenAI endpoint, or several (default: {DEFAULT_URL})"),
        ("--grpc", "HOST:PORT,...", str, None, "pdserve's gRPC API instead"),
        ("--model", "NAME", str, None, "served model (default: the only one)"),
        ("--vocab-size", "N", _count, None, "if the endpoint does not report it"),
        _TRACE,
        ("--limit", "N", _count, None, "only the first N requests"),
        *_SHAPE,
        ("--speedup", "F", _positive, 1.0, "of arrivals"),
        ("--rate:rate_per_s", "R", _positive, None, "mean requests/s, instead of --speedup"),
        _SEED,
        ("--warmup", "N", _whole, 1, "requests before the measurement"),
        ("--drain-timeout:drain_timeout_s", "S", _positive, 300.0, "for the last answers"),
        *_LIMITS,
        ("--out", "FILE", Path, None, "write all timelines there"),
        _JSON,
    ),
    "compare": (
        (
            *("--arms --variants", "V,...", str, None),
            "1P1D, 2A, name=2A, vllm-pd, vllm-2a, ... (default: 1P1D,2A)",
        ),
        ("--arm --variant:endpoints", "NAME=URL", "+", (), "a running OpenAI endpoint"),
        (
            *("--arm-set --variant-set", "NAME:KEY=VALUE", "+", ()),
            "a configuration key of one variant (add --differ)",
        ),
        ("--differ", "SETTING,...", str, "", "settings that may differ"),
        ("--baseline", "NAME", str, None, "for ratios (default: the last)"),
        (
            *("--kv-cache-mib", "N", _count, None),
            "total of a variant's workers (default on CPUs: a share of a quarter of the memory)",
        ),
        ("--url-model:endpoint_model", "NAME", str, None, "model of endpoints"),
        ("--vocab-size", "N", _count, None, "if no variant reports it"),
        _TRACE,
        ("--rate:rate_per_s", "R", _positive, 2.0, "requests/s"),
        ("--requests", "N", _count, 40, "a round"),
        ("--rounds", "K", _whole, 5, "in turn"),
        (
            *("--scale-lengths", "F", _fraction, None),
            "multiply all lengths (default: 1, on a CPU: prompts of 512 on average)",
        ),
        *_CUTS,
        _SEED,
        *_LIMITS,
        ("--sweep", "PROBES?", _count, None, "find the highest rate with 90 %% within the limits"),
        ("--probe-seconds:probe_s", "S", _positive, 15.0, "of a probe"),
        ("--out", "DIR", Path, None, "for result.json and report.html"),
        ("--resume", "DIR", Path, None, "continue the run in DIR"),
        _JSON,
    ),
    "report": (
        ("result", "FILE|DIR", Path, None, "written by --out"),
        ("--html", "OUT", Path, None, "write report.html"),
        _JSON,
    ),
    "chaos": (
        ("--list", "", None, False, "list the scenarios"),
        (
            *("--only", "NAME,...", str, None),
            "these scenarios; `storms`: all storms of aborts (default: all but storms)",
        ),
        ("--models", "DIR", Path, None, "checkpoints for storms, by name (--list)"),
        ("--engine", "vllm|fake", ("vllm", "fake"), "vllm", "of the service"),
        ("--prefill", "N", _count, 2, "workers"),
        ("--decode", "N", _count, 2, "workers"),
        ("--requests", "N", _count, 24, "a scenario"),
        ("--rate:rate_per_s", "R", _positive, 6.0, "requests/s"),
        ("--seed", "N", _whole, 1, "for prompts"),
        ("--run-dir", "DIR", Path, None, "for logs (default: a new one)"),
        ("--set", "KEY=VALUE", "+", (), "of the configuration"),
        _JSON,
    ),
    "soak": (
        ("--duration:duration_s", "S", _positive, 3600.0, "in seconds"),
        ("--engine", "vllm|fake", ("vllm", "fake"), "fake", "of the service"),
        ("--prefill", "N", _count, 2, "permanent workers"),
        ("--decode", "N", _count, 2, "permanent workers; the last one is killed now and then"),
        ("--rate:rate_per_s", "R", _positive, 24.0, "requests/s, less what answers take"),
        ("--clients", "N", _count, 8, "concurrent clients"),
        ("--churn:churn_s", "S", _positive, 20.0, "between two workers that join and leave"),
        ("--sample:sample_s", "S", _positive, 5.0, "between two samples"),
        ("--seed", "N", _whole, 1, "for requests"),
        ("--run-dir", "DIR", Path, None, "for logs (default: a new one)"),
        ("--set", "KEY=VALUE", "+", (), "of the configuration"),
        _JSON,
    ),
    "simulate": (
        *_WORKERS,
        ("--regions", "N", _few, 1, "over which the workers are spread; the router is in one"),
        ("--scale", "N", _whole, 0, "let workers follow the load, up to N of each role"),
        ("--cold-start:cold_start_s", "S", _positive, 0.0, "start time of a worker"),
        *_LOAD,
    ),
    "plan": (
        ("--target", "SHARE", _positive, 0.99, "of requests that meet the SLOs"),
        ("--price", "X", _positive, None, "of a worker's hour"),
        *_LOAD,
    ),
}
# Help and description of each command.
_ABOUT: Final = {
    "replay": (
        "send the requests of a trace to an endpoint and measure the answers",
        """Send each request when it is due (open loop). Exit status: 0, 1 if a request failed,
        2 for wrong options or a malformed trace.""",
    ),
    "compare": (
        "measure disaggregated and aggregated serving side by side",
        """Start the variants with equal cores and settings, send each the same traffic in
        turns, and print figures with intervals. Exit status: 0, 2 for wrong options
        or variants that differ, 3 if the run is invalid, 130 if interrupted.""",
    ),
    "report": (
        "print a stored result again, or write its report",
        """Compute the figures from the timelines that replay or compare stored. Exit status: 0, 2
        if the file is no result, 3 if the comparison is invalid.""",
    ),
    "chaos": (
        "break a service in many ways and check every answer",
        """Start a service, send it requests, and inject one fault per scenario. Every answer is
        compared, token by token, with the answer of an undisturbed engine. Exit
        status: 0 if no request failed, no token was wrong and no KV block leaked, else 1.""",
    ),
    "soak": (
        "run a service under traffic and worker churn, and detect leaks",
        """Start a service, send it requests in all APIs, let workers come and go, and sample
        memory, descriptors, threads, tasks, metric series and disk of its processes. Exit status:
        0, 1 if one of them grows without bound or requests failed.""",
    ),
    "simulate": (
        "serve a trace with the real router and fake engines in virtual time",
        """The router's own code serves a trace with engines whose step times --costs defines.
        Exit status: 0, 2 for wrong options.""",
    ),
    "plan": (
        "find how many workers a load needs",
        """Search by simulation for the fewest workers that meet the SLOs, with and without
        disaggregation. Exit status: 0, 2 for wrong options or SLOs that cannot be met.""",
    ),
}
_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "compare": {"--model": "worker.model", "--engine": "worker.engine"},
    "simulate": {"--policy": "router.policy"},
    "plan": {"--policy": "router.policy"},
}


def register(subparsers: Any) -> None:
    """Add `bench` with its commands. Each sets `handler`, which returns the exit status."""
    bench = subparsers.add_parser("bench", help="replay traces, compare, break and simulate")
    commands = bench.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    for name, options in _OPTIONS.items():
        about, details = _ABOUT[name]
        parser = add_command(commands, name, _handler(name), about, details)
        parser.usage = f"pdserve bench {name} [options]"
        # One line an option, so that the help of a command fits a screen.
        parser.formatter_class = partial(argparse.HelpFormatter, max_help_position=38, width=120)
        for option in options:
            _add(parser, *option)
        if name in ("replay", "compare"):
            add_dial_options(parser)
        if name in _KEYS:
            add_config_options(parser, _KEYS[name])


def _add(
    parser: argparse.ArgumentParser, names: str, metavar: str, kind: Any, default: Any, text: str
) -> None:
    names, _, dest = names.partition(":")
    words: dict[str, Any] = {"help": text, "default": default}
    if default not in (None, False, 0, "", ()) and default != Fraction(1):
        words["help"] += f" ({default:g})" if isinstance(default, float) else f" ({default})"
    if dest:
        words["dest"] = dest
    if not metavar:
        words["action"] = "store_true"
    elif kind == "+":
        words |= {"action": "append", "default": [], "metavar": metavar}
    elif isinstance(kind, tuple):
        words["choices"] = kind
    elif metavar.endswith("?"):
        words |= {"nargs": "?", "const": 8, "type": kind, "metavar": metavar.removesuffix("?")}
    else:
        words |= {"type": kind, "metavar": metavar}
    parser.add_argument(*names.split(), **words)


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command; it turns errors into a message and an exit status."""

    def handler(args: argparse.Namespace) -> int:
        from benchmarks import commands

        try:
            status: int = getattr(commands, name)(args)
        except BenchError as error:
            sys.stderr.write(f"pdserve bench: {error}\n")
            return FAILED if isinstance(error, WarmupFailed) else BAD_INPUT
        except KeyboardInterrupt:
            sys.stderr.write("pdserve bench: interrupted\n")
            return INTERRUPTED
        return status

    return handler
