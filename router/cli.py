"""`pdserve router`. What the command needs is imported when it runs."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from pdserve.background import background
from pdserve.cli import flags
from pdserve.cli.options import add_command, add_config_options, config_from
from pdserve.config.watch import file_changes, file_state
from pdserve.errors import ConfigError
from pdserve.observe.logs import log_to_stderr
from pdserve.process.child import add_child_options, served_process
from pdserve.process.forkserver import use_server

if TYPE_CHECKING:
    from pdserve.cli.options import Subparsers
    from pdserve.config import RouterConfig
    from pdserve.process.child import Reports
    from router.main import RouterServer

logger = logging.getLogger(__name__)

# Garbage collection walks every open stream: 75 ms with 1,000 on a small machine. Requests leave
# almost no cycles, so it runs rarely.
_GC_THRESHOLDS = (10_000, 100)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(commands: Subparsers) -> None:
    router = add_command(
        commands,
        "router",
        _router,
        "run one router",
        "Run one router until SIGTERM or Ctrl-C. Workers register at its gRPC address.",
    )
    add_config_options(router, flags.ROUTER)
    add_child_options(router)
    router.add_argument("--fork-fd", type=int, help=argparse.SUPPRESS)


def _router(args: argparse.Namespace) -> int:
    with served_process(args) as reports:
        if args.fork_fd is not None:
            use_server(args.fork_fd)
        config = config_from(args).router
        log_to_stderr(config.log.level, config.log.format)
        import uvloop

        uvloop.run(_serve(config, reports, args))
    return 0


async def _follow_file(
    server: RouterServer,
    args: argparse.Namespace,
    hup: asyncio.Event,
    used: tuple[int, ...] | None,
) -> None:
    """Apply changes of the configuration file, after each change or when `hup` is set."""
    from pdserve.observe.audit import Caller

    async for was_asked in file_changes(args.config, hup, used):
        caller = Caller("SIGHUP" if was_asked else f"file {args.config}")
        try:
            server.live.change((await asyncio.to_thread(config_from, args)).router, caller)
        except ConfigError as error:
            logger.error("the configuration stays as it was: %s", error.message)


async def _serve(config: RouterConfig, reports: Reports, args: argparse.Namespace) -> None:
    """Serve until a signal, then let open requests finish. A second signal ends at once. SIGHUP
    reads the configuration file again, if there is one."""
    from pdserve.net.sockets import reachable
    from router.main import RouterServer

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def on_signal() -> None:
        stopped.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    hup, following, used = asyncio.Event(), AsyncExitStack(), None
    if args.config is not None:
        used = file_state(args.config)
        loop.add_signal_handler(signal.SIGHUP, hup.set)
    server = RouterServer(config)
    try:
        addresses = await server.start()
        scheme = "https" if config.access.http_tls.cert_file else "http"
        http, grpc = f"{scheme}://{reachable(addresses.http)}", reachable(addresses.grpc)
        logger.info("serving HTTP at %s and gRPC at %s", http, grpc)
        if config.http.shared_port:
            logger.info("serving HTTP at the shared port %d", config.http.shared_port)
        reports.ready({"http": http, "grpc": grpc})
        gc.collect()
        gc.freeze()  # garbage collection never visits the objects that exist now
        gc.set_threshold(*_GC_THRESHOLDS)
        if args.config is not None:
            follow = background("configuration", partial(_follow_file, server, args, hup, used))
            await following.enter_async_context(follow)
        await stopped.wait()
        logger.info("stopping; open requests have %g s, until a second signal", config.stop_grace_s)
    finally:
        await following.aclose()
        await server.stop()
