"""`pdserve worker`."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from pdserve.cli.options import add_config_options, config_from, formatter
from pdserve.local.child import add_child_options, served_process, set_up_logging

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers

_FLAGS = {
    "--worker-id": "worker.worker_id",
    "--role": "worker.role",
    "--engine": "worker.engine",
    "--model": "worker.model",
    "--model-name": "worker.model_name",
    "--host": "worker.host",
    "--port": "worker.port",
    "--router": "worker.routers",
    "--cores": "worker.cores",
    "--kv-connector": "worker.kv.connector",
    "--kv-host": "worker.kv.host",
    "--kv-transport": "worker.kv.transports",
    "--require-auth": "worker.access.require_auth",
    "--otlp-endpoint": "worker.otlp_endpoint",
    "--log-level": "worker.log_level",
}


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "worker",
        help="run one worker",
        description="Run one worker. On SIGTERM or Ctrl-C it takes no new work and ends after its "
        "last request; a second signal ends it at once.",
        formatter_class=formatter,
    )
    add_config_options(parser, _FLAGS)
    add_child_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    with served_process(args) as reports:
        config = config_from(args).worker
        set_up_logging(config.log_level)
        from workers.main import run_worker

        code = run_worker(config, reports=reports)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process without tearing down the interpreter, which takes seconds with torch."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
