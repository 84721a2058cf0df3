"""`pdserve up`: routers and workers on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.cli.options import add_config_options, config_from, formatter

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers

_FLAGS = {
    "--prefill": "up.prefill",
    "--decode": "up.decode",
    "--aggregated": "up.aggregated",
    "--routers": "up.routers",
    "--model": "worker.model",
    "--model-name": "worker.model_name",
    "--engine": "worker.engine",
    "--http-host": "router.http_host",
    "--http-port": "router.http_port",
    "--shared-http-port": "router.shared_http_port",
    "--grpc-host": "router.grpc_host",
    "--grpc-port": "router.grpc_port",
    "--kv-connector": "worker.kv.connector",
    "--kv-transport": "worker.kv.transports",
    "--require-auth": "router.access.require_auth",
    "--cores-per-worker": "up.cores_per_worker",
    "--ready-file": "up.ready_file",
    "--run-dir": "up.run_dir",
    "--start-timeout": "up.start_timeout_s",
}


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "up",
        help="start router and workers on this machine",
        description="Start routers and workers as processes on this machine. Ctrl-C or SIGTERM "
        "lets running requests finish, a second Ctrl-C ends at once. A process that dies is "
        "restarted.",
        formatter_class=formatter,
    )
    add_config_options(parser, _FLAGS)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from pdserve.local.display import Display
    from pdserve.local.supervisor import Supervisor

    async def run() -> int:
        return await Supervisor(config_from(args), Display()).run()

    return asyncio.run(run())
