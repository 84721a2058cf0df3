"""`pdserve router`."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import TYPE_CHECKING

from pdserve.commands.options import add_config_options, config_from
from pdserve.commands.serving import add_child_options, served_process, set_up_logging

if TYPE_CHECKING:
    import argparse

    from pdserve.child import Reports
    from pdserve.commands.options import Subparsers
    from pdserve.config import RouterConfig

logger = logging.getLogger(__name__)

_FLAGS = {
    "--http-host": "router.http_host",
    "--http-port": "router.http_port",
    "--shared-http-port": "router.shared_http_port",
    "--grpc-host": "router.grpc_host",
    "--grpc-port": "router.grpc_port",
    "--require-auth": "router.access.require_auth",
    "--otlp-endpoint": "router.otlp_endpoint",
    "--log-level": "router.log_level",
}
# Between two collections of the youngest; Python's own 700 is soon reached by one step's tokens.
_GC_ALLOCATIONS = 10_000
# Between two of those that have outlived one, which walk every open stream: 75 ms with 1,000 on a
# small machine. What a request leaves needs no collector, so there is little to find.
_GC_YOUNGEST = 100
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "router",
        help="run one router",
        description="Run one router until SIGTERM or Ctrl-C. Workers find it at its gRPC address, "
        "in whatever order they are started.",
    )
    add_config_options(parser, _FLAGS)
    add_child_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    with served_process(args) as reports:
        config = config_from(args).router
        set_up_logging(config.log_level)
        import uvloop

        uvloop.run(_serve(config, reports))
    return 0


async def _serve(config: RouterConfig, reports: Reports) -> None:
    """Serve until a signal, then let open requests finish; a second signal ends at once."""
    from pdserve.up.specs import reachable
    from router.main import RouterServer

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def on_signal() -> None:
        stopped.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    server = RouterServer(config)
    try:
        addresses = await server.start()
        scheme = "https" if config.access.http_tls.cert_file else "http"
        http, grpc = f"{scheme}://{reachable(addresses.http)}", reachable(addresses.grpc)
        logger.info("serving HTTP at %s and gRPC at %s", http, grpc)
        if config.shared_http_port:
            logger.info("serving HTTP at port %d too, with others", config.shared_http_port)
        reports.ready({"http": http, "grpc": grpc})
        _spare_the_collector()
        await stopped.wait()
        logger.info("stopping; open requests have %g s", config.stop_grace_s)
    finally:
        await server.stop()


def _spare_the_collector() -> None:
    """What is there at the start stays: a collection that walks it holds up every stream."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, _GC_YOUNGEST)
