"""`pdserve serve`: what `vllm serve` does for one engine, for prefill and decode workers."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from pdserve.cli.options import add_command, add_config_options, changes_from
from pdserve.config import load_config
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine

    from pdserve.cli.options import Subparsers

_OWN = {
    "--prefill": "up.prefill.workers",
    "--decode": "up.decode.workers",
    "--aggregated": "up.aggregated.workers",
    "--routers": "up.routers",
    "--kv-transport": "worker.kv.transports",
    "--ready-file": "up.ready_file",
    "--run-dir": "up.run_dir",
}


def register(commands: Subparsers) -> None:
    parser = add_command(
        *(commands, "serve", _serve, "serve a model with the flags of `vllm serve`"),
        "Start a router, prefill workers and decode workers on this machine, with the flags of "
        "`vllm serve`: `pdserve serve MODEL --decode 2 --max-model-len 8192`. A flag with the name "
        "of a role before it is for that role alone: `--decode.max-num-seqs 256`. "
        "`vllm serve --help=all` lists vLLM's flags.",
    )
    parser.usage = "pdserve serve MODEL [--prefill N] [--decode N] [flags of vllm serve]"
    parser.allow_abbrev = False  # an abbreviation may be of one of vLLM's flags
    parser.passes_on = True
    parser.set_defaults(parser=parser)
    add_config_options(parser, _OWN, file=False)


def _serve(args: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from pdserve.local.display import Display
    from pdserve.local.supervisor import Supervisor, make_run_dir, vllm_forkserver
    from pdserve.local.vllm_flags import read_flags

    changes, display = changes_from(args), Display()
    run_dir = make_run_dir(str(changes.get("up.run_dir", "")))
    forkserver = vllm_forkserver(run_dir)
    display.tell("importing vLLM")
    try:
        try:
            flags = asyncio.run(read_flags(args.words, forkserver, run_dir / "flags.log"))
        except ConfigError as error:
            args.parser.error(error.message)
        if token := flags.pop("hf_token", ""):
            os.environ["HF_TOKEN"] = str(token)
        config = load_config(None, {**flags, "up.run_dir": str(run_dir), **changes})
        return Supervisor(config, display, forkserver).run()
    except BaseException:
        if forkserver is not None:
            forkserver.close()
        raise
