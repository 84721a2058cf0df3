"""`pdserve serve` and `up`: start a service on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli import cluster, flags
from pdserve.cli.options import (
    add_command,
    add_config_options,
    aggregated_alone,
    changes_from,
    config_from,
)
from pdserve.config import load_config, read_file
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
        "--max-model-len 8192`. A role's name before a flag limits it to that role: "
        "`--decode.max-num-seqs 256`. `vllm serve --help=all` lists vLLM's flags.",
    )
    serve.usage = "pdserve serve MODEL [--prefill N] [--decode N] [flags of vllm serve]"
    serve.passes_on = True
    serve.set_defaults(parser=serve)
    text = "YAML file of flags, such as `max-model-len: 8192`; those of the command line win"
    serve.add_argument("--config", type=Path, metavar="FILE", help=text)
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
    from pdserve.deploy.local.launcher import vllm_forkserver
    from pdserve.deploy.local.supervisor import Supervisor, make_run_dir
    from pdserve.deploy.local.vllm_flags import read_flags
    from pdserve.process.gpus import check_packages

    (changes, words), display = flags_from(args), Display()
    check_packages()  # vLLM's parser reads the flags, also for a fake engine
    run_dir = make_run_dir(str(changes.get("up.run_dir", "")))
    forkserver = vllm_forkserver(run_dir)
    display.tell("importing vLLM")
    try:
        try:
            given = asyncio.run(read_flags(words, forkserver, run_dir / "flags.log"))
        except ConfigError as error:
            args.parser.error(error.message)
        if token := given.pop("hf_token", ""):
            os.environ["HF_TOKEN"] = str(token)
        config = load_config(None, aggregated_alone({**given, **changes}))
        return Supervisor(config, display, forkserver, run_dir=run_dir).run()
    except BaseException:
        if forkserver is not None:
            forkserver.close()
        raise


def flags_from(args: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """Return the keys that pdserve's own flags set, and the words for vLLM's parser. The flags of
    `--config` come first, behind MODEL."""
    given: list[str] = args.words
    if args.config is None:
        return changes_from(args), given
    flags_of = read_file(args.config)
    model = flags_of.pop("model", None)
    if not given or given[0].startswith("-"):
        given = [*(() if model is None else (str(model),)), *given]
    own = args.parser.parse_args([word for x in flags_of.items() for word in flag_words(*x)])
    has_model = bool(given) and not given[0].startswith("-")
    words = [*given[:has_model], *own.words, *given[has_model:]]
    return changes_from(own) | changes_from(args), words


def flag_words(name: str, value: object) -> list[str]:
    """Return a key of `--config` as a flag. False is the flag with `no-`, None no flag."""
    role, dot, rest = name.replace("_", "-").rpartition(".")
    flag = f"--{role}{dot}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"{flag}{'' if value else 'no-'}{rest}"]
    texts = [
        json.dumps(x) if isinstance(x, dict) else str(x)
        for x in (value if isinstance(value, list) else [value])
    ]
    is_one = not isinstance(value, list)
    return [f"{flag}{rest}={texts[0]}"] if is_one else [f"{flag}{rest}", *texts] if texts else []


def _up(args: argparse.Namespace) -> int | Coroutine[Any, Any, int]:
    if args.on:
        return cluster.up(args)
    from pdserve.deploy.local.display import Display
    from pdserve.deploy.local.supervisor import Supervisor

    reload = partial(config_from, args)
    return Supervisor(reload(), Display(), file=args.config, reload=reload).run()
