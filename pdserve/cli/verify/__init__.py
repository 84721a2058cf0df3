"""`pdserve verify`: check what any OpenAI-compatible endpoint promises."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

from pdserve.cli.options import (
    DEFAULT_URL,
    add_command,
    add_dial_options,
    add_seconds,
    api_key_from,
    http_tls_from,
    say,
)
from pdserve.config import refuse

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers
    from pdserve.cli.verify.endpoint import Endpoint
    from pdserve.cli.verify.outcome import Check

ALL_HOLD, SOME_FAIL, UNCHECKED = 0, 1, 2


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "verify",
        _run,
        "check what an OpenAI-compatible endpoint promises",
        "Check that an endpoint, ours or another's, answers as OpenAI's API and P/D serving "
        "promise. docs/verify.md lists the checks. Exit code 0 if all checks that apply hold, 1 if "
        "some fail, 2 if nothing can be checked.",
    )
    text = "address of the API, with or without /v1 (default: %(default)s)"
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=text)
    parser.add_argument("--model", default="", help="served model (default: the first)")
    add_seconds(parser, "--timeout", 60.0, "limit of each check")
    for flag, text in (("--only", "run only these checks"), ("--skip", "do not run these checks")):
        parser.add_argument(flag, type=_names, default=[], metavar="NAME,...", help=text)
    text = "maximum concurrent requests (default: %(default)s)"
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help=text)
    text = "the endpoint claims P/D: fail if there is no sign of it"
    parser.add_argument("--disaggregated", action="store_true", help=text)
    text = "checkpoint on the workers' machines: the model is paused, and updated to it"
    parser.add_argument("--weights", default="", metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print results and evidence as JSON")
    add_dial_options(parser)


def _names(text: str) -> list[str]:
    return text.split(",")


async def _run(args: argparse.Namespace) -> int:
    from pdserve.cli.verify.endpoint import Broken, Endpoint, Refused

    checks = _chosen(args)
    if args.concurrency < 1:
        refuse("--concurrency", f"must be at least 1, not {args.concurrency}")
    async with Endpoint.connect(
        args.url,
        key=api_key_from(args),
        tls=http_tls_from(args),
        model=args.model,
        concurrency=args.concurrency,
        timeout_s=args.timeout,
        is_claimed=args.disaggregated,
        weights=args.weights,
    ) as endpoint:
        try:
            async with asyncio.timeout(args.timeout):
                await endpoint.discover()
        except (Refused, Broken, TimeoutError) as error:
            why = error if str(error) else f"no answer within {args.timeout:g} s"
            _tell(f"pdserve: cannot check {args.url}: {why}")
            return UNCHECKED
        return await _verify(endpoint, checks, as_json=args.json)


def _chosen(args: argparse.Namespace) -> list[Check]:
    """Return the checks that `--only` and `--skip` leave. Raises ConfigError for an unknown one."""
    from pdserve.cli.verify.checks import CHECKS

    names = [check.name for check in CHECKS]
    for flag, given in (("--only", args.only), ("--skip", args.skip)):
        for name in given:
            if name not in names:
                refuse(flag, f"there is no check {name!r}; there are {', '.join(names)}")
    return [x for x in CHECKS if x.name in (args.only or names) and x.name not in args.skip]


async def _verify(endpoint: Endpoint, checks: list[Check], *, as_json: bool) -> int:
    from pdserve.cli.console import open_console
    from pdserve.cli.verify.report import FAILS, HOLDS, run_check, show

    costs = [check.cost(endpoint.concurrency) for check in checks]
    requests, tokens = (sum(column) for column in zip((0, 0), *costs, strict=True))
    _tell(
        f"{len(checks)} checks of {endpoint.model} ask for {tokens} tokens of answers at most, in "
        f"{requests} requests, {endpoint.timeout_s:g} s a check at most"
    )
    results = []
    try:
        for number, check in enumerate(checks, 1):
            _tell(f"[{number}/{len(checks)}] {check.name}: {check.promise}")
            results.append(await run_check(endpoint, check))
            _tell(f"    {results[-1].word} in {results[-1].seconds:.1f} s: {results[-1].note}")
    finally:
        # Also after Ctrl-C, with the results so far.
        if as_json:
            shown = [result.shown() for result in results]
            about = {"url": endpoint.root, "model": endpoint.model}
            say(json.dumps({**about, "checks": shown}, indent=2, ensure_ascii=False))
        else:
            show(open_console(), endpoint, results)
    words = {result.word for result in results}
    return SOME_FAIL if FAILS in words else ALL_HOLD if HOLDS in words else UNCHECKED


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
