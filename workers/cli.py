"""`pdserve worker`. What the command needs is imported when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pdserve.cli import flags
from pdserve.cli.options import add_command, add_config_options, config_from, log_to_stderr
from pdserve.process.child import add_child_options, exit_at_once, served_process

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers

_FLAGS = {
    "--role": "worker.role",
    "--host": "worker.host",
    "--port": "worker.port",
    "--router": "worker.routers",
    "--cores": "worker.cores",
    "--nnodes": "worker.nnodes",
    "--node-rank": "worker.node_rank",
    "--master-addr": "worker.master_addr",
    "--master-port": "worker.master_port",
    "--data-parallel-size": "worker.data_parallel_size",
    "--data-parallel-rank": "worker.data_parallel_rank",
    "--data-parallel-address": "worker.data_parallel_address",
    "--data-parallel-port": "worker.data_parallel_port",
    "--data-parallel-group": "worker.data_parallel_group",
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


def _worker(args: argparse.Namespace) -> NoReturn:
    with served_process(args) as reports:
        config = config_from(args).worker
        log_to_stderr(config.log_level)
        from workers.main import run_worker

        code = run_worker(config, reports=reports)
    exit_at_once(code)
