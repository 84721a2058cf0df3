"""`pdserve worker`. What the command needs is imported when it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from pdserve.cli import flags
from pdserve.cli.options import add_command, add_config_options, config_from
from pdserve.observe.logs import log_to_stderr
from pdserve.process.child import add_child_options, exit_at_once, served_process
from pdserve.process.gpus import check_packages

if TYPE_CHECKING:
    from pdserve.cli.options import Subparsers

_FLAGS = {
    "--role": "worker.role",
    "--host": "worker.host",
    "--port": "worker.port",
    "--router": "worker.routers",
    "--cores": "worker.cores",
    "--nnodes": "worker.nodes.count",
    "--node-rank": "worker.nodes.rank",
    "--master-addr": "worker.nodes.address",
    "--master-port": "worker.nodes.port",
    "--data-parallel-size": "worker.data_parallel.size",
    "--data-parallel-rank": "worker.data_parallel.rank",
    "--data-parallel-address": "worker.data_parallel.address",
    "--data-parallel-port": "worker.data_parallel.port",
    "--data-parallel-group": "worker.data_parallel.group",
    **flags.ENGINE,
    "--require-auth": "worker.access.require_auth",
}


def register(commands: Subparsers) -> None:
    worker = add_command(
        commands,
        "worker",
        _worker,
        "run one worker",
        "Run one worker. On SIGTERM or Ctrl-C it takes no new work and ends after its last "
        "request; a second signal ends it at once.",
    )
    add_config_options(worker, _FLAGS)
    add_child_options(worker)
    # `load`: do not start unless compiled code can be loaded. `make` and `check`: make compiled
    # code, or load it, and end.
    worker.add_argument("--code", choices=("load", "make", "check"), help=argparse.SUPPRESS)


def _worker(args: argparse.Namespace) -> NoReturn:
    with served_process(args) as reports:
        config = config_from(args).worker
        if config.engine == "vllm":
            check_packages()
        log_to_stderr(config.log.level, config.log.format)
        if args.code:
            from workers.vllm.start.compiled_code import make_code, require_code

            if args.code != "make":
                require_code()
            if args.code != "load":
                reports.ready({"files": make_code(config)})
                exit_at_once(0)
        from workers.main import run_worker

        code = run_worker(config, reports=reports)
    exit_at_once(code)
