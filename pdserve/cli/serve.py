"""`pdserve serve` and `up`: start a service on this machine."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from pdserve.cli import cluster, flags
from pdserve.cli.options import add_command, add_config_options, changes_from, config_from
from pdserve.config import load_config
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine

    from pdserve.cli.options import Subparsers


def register(commands: Subparsers) -> None:
    serve = add_command(
        commands,
        "serve",
        _serve,
        "serve a model with the flags of `vllm serve`",
        "As `pdserve up`, with the flags of `vllm serve`: `pdserve serve MODEL --decode 2 "
        "--max-model-len 8192`. A flag with the name of a role before it is for that role alone: "
        "`--decode.max-num-seqs 256`. `vllm serve --help=all` lists vLLM's flags.",
    )
    serve.usage = "pdserve serve MODEL [--prefill N] [--decode N] [flags of vllm serve]"
    serve.allow_abbrev = False  # an abbreviation may be of one of vLLM's flags
    serve.passes_on = True
    serve.set_defaults(parser=serve)
    add_config_options(serve, flags.PROCESSES | flags.PARSERS, file=False)
    up = add_command(
        commands,
        "up",
        _up,
        "start router and workers on this machine",
        "Start routers and workers as processes on this machine. Ctrl-C or SIGTERM lets running "
        "requests finish, a second ends at once. What dies is restarted. With --on ray they are on "
        "a Ray cluster, and stay there.",
    )
    add_config_options(up, flags.UP)
    cluster.add_up_options(up)


def _serve(args: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from pdserve.deploy.local.display import Display
    from pdserve.deploy.local.supervisor import Supervisor, make_run_dir, vllm_forkserver
    from pdserve.deploy.local.vllm_flags import read_flags

    changes, display = changes_from(args), Display()
    run_dir = make_run_dir(str(changes.get("up.run_dir", "")))
    forkserver = vllm_forkserver(run_dir)
    display.tell("importing vLLM")
    try:
        try:
            given = asyncio.run(read_flags(args.words, forkserver, run_dir / "flags.log"))
        except ConfigError as error:
            args.parser.error(error.message)
        if token := given.pop("hf_token", ""):
            os.environ["HF_TOKEN"] = str(token)
        config = load_config(None, {**given, "up.run_dir": str(run_dir), **changes})
        return Supervisor(config, display, forkserver).run()
    except BaseException:
        if forkserver is not None:
            forkserver.close()
        raise


def _up(args: argparse.Namespace) -> int | Coroutine[Any, Any, int]:
    if args.on:
        return cluster.up(args)
    from pdserve.deploy.local.display import Display
    from pdserve.deploy.local.supervisor import Supervisor

    return Supervisor(config_from(args), Display()).run()
