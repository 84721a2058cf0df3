"""`pdserve router`."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import TYPE_CHECKING

from pdserve.cli.options import add_config_options, config_from, formatter
from pdserve.local.child import add_child_options, served_process, set_up_logging

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers
    from pdserve.config import RouterConfig
    from pdserve.local.child import Reports

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
# Garbage collection walks every open stream: 75 ms with 1,000 on a small machine. Requests leave
# almost no cycles, so it runs rarely.
_GC_THRESHOLDS = (10_000, 100)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "router",
        help="run one router",
        description="Run one router until SIGTERM or Ctrl-C. Workers register at its gRPC address.",
        formatter_class=formatter,
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
    """Serve until a signal, then let open requests finish. A second signal ends at once."""
    from pdserve.local.specs import reachable
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
            logger.info("serving HTTP at the shared port %d", config.shared_http_port)
        reports.ready({"http": http, "grpc": grpc})
        _tune_gc()
        await stopped.wait()
        logger.info("stopping; open requests have %g s", config.stop_grace_s)
    finally:
        await server.stop()


def _tune_gc() -> None:
    """Exclude what exists now from garbage collection, and collect rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
