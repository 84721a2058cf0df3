"""`pdserve serve`, `up`, `router` and `worker`: the commands that serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from typing import TYPE_CHECKING, Any, NoReturn

from pdserve.cli import cluster
from pdserve.cli.options import (
    add_command,
    add_config_options,
    changes_from,
    config_from,
    log_to_stderr,
)
from pdserve.config import load_config
from pdserve.errors import ConfigError
from pdserve.local.child import add_child_options, exit_at_once, served_process

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine

    from pdserve.cli.options import Subparsers
    from pdserve.config import RouterConfig
    from pdserve.local.child import Reports

logger = logging.getLogger(__name__)

_LISTENERS = {
    "--http-host": "router.http_host",
    "--http-port": "router.http_port",
    "--shared-http-port": "router.shared_http_port",
    "--grpc-port": "router.grpc_port",
    "--require-auth": "router.access.require_auth",
}
_ENGINE = {
    "--model": "worker.model",
    "--model-name": "worker.model_names",
    "--engine": "worker.engine",
    "--kv-connector": "worker.kv.connector",
    "--kv-transport": "worker.kv.transports",
}
_PROCESSES = {
    "--prefill": "up.prefill.workers",
    "--decode": "up.decode.workers",
    "--max-prefill": "up.prefill.max_workers",
    "--max-decode": "up.decode.max_workers",
    "--aggregated": "up.aggregated.workers",
    "--pooling": "up.pooling.workers",
    "--routers": "up.routers",
    "--ready-file": "up.ready_file",
    "--run-dir": "up.run_dir",
}
_PARSERS = {
    "--tool-call-parser": "router.tool_call_parser",
    "--reasoning-parser": "router.reasoning_parser",
}
_ROUTER = {**_LISTENERS, **_PARSERS}
_UP = {**_PROCESSES, **_ENGINE, **_ROUTER}
_OF_THIS_MACHINE = ("--ready-file", "--run-dir")
_WORKER = {
    "--role": "worker.role",
    "--host": "worker.host",
    "--port": "worker.port",
    "--router": "worker.routers",
    "--cores": "worker.cores",
    "--nnodes": "worker.nnodes",
    "--node-rank": "worker.node_rank",
    "--master-addr": "worker.master_addr",
    "--master-port": "worker.master_port",
    **_ENGINE,
    "--require-auth": "worker.access.require_auth",
}
# Garbage collection walks every open stream: 75 ms with 1,000 on a small machine. Requests leave
# almost no cycles, so it runs rarely.
_GC_THRESHOLDS = (10_000, 100)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(commands: Subparsers) -> None:
    serve = add_command(
        *(commands, "serve", _serve, "serve a model with the flags of `vllm serve`"),
        "As `pdserve up`, with the flags of `vllm serve`: `pdserve serve MODEL --decode 2 "
        "--max-model-len 8192`. A flag with the name of a role before it is for that role alone: "
        "`--decode.max-num-seqs 256`. `vllm serve --help=all` lists vLLM's flags.",
    )
    serve.usage = "pdserve serve MODEL [--prefill N] [--decode N] [flags of vllm serve]"
    serve.allow_abbrev = False  # an abbreviation may be of one of vLLM's flags
    serve.passes_on = True
    serve.set_defaults(parser=serve)
    add_config_options(serve, _PROCESSES | _PARSERS, file=False)
    up = add_command(
        *(commands, "up", _up, "start router and workers on this machine"),
        "Start routers and workers as processes on this machine. Ctrl-C or SIGTERM lets running "
        "requests finish, a second ends at once. What dies is restarted. With --on ray they are on "
        "a Ray cluster, and stay there.",
    )
    router = add_command(
        *(commands, "router", _router, "run one router"),
        "Run one router until SIGTERM or Ctrl-C. Workers register at its gRPC address.",
    )
    worker = add_command(
        *(commands, "worker", _worker, "run one worker"),
        "Run one worker. On SIGTERM or Ctrl-C it takes no new work and ends after its last "
        "request; a second signal ends it at once.",
    )
    for parser, flags in ((up, _UP), (router, _ROUTER), (worker, _WORKER)):
        add_config_options(parser, flags)
    cluster.add_up_options(up)
    cluster.add_upgrade(commands, {f: key for f, key in _UP.items() if f not in _OF_THIS_MACHINE})
    add_child_options(router)
    add_child_options(worker)


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


def _up(args: argparse.Namespace) -> int | Coroutine[Any, Any, int]:
    if args.on:
        return cluster.up(args)
    from pdserve.local.display import Display
    from pdserve.local.supervisor import Supervisor

    return Supervisor(config_from(args), Display()).run()


def _router(args: argparse.Namespace) -> int:
    with served_process(args) as reports:
        config = config_from(args).router
        log_to_stderr(config.log_level)
        import uvloop

        uvloop.run(_serve_as_router(config, reports))
    return 0


async def _serve_as_router(config: RouterConfig, reports: Reports) -> None:
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
        gc.collect()
        gc.freeze()  # garbage collection never walks what exists now
        gc.set_threshold(*_GC_THRESHOLDS)
        await stopped.wait()
        logger.info("stopping; open requests have %g s, until a second signal", config.stop_grace_s)
    finally:
        await server.stop()


def _worker(args: argparse.Namespace) -> NoReturn:
    with served_process(args) as reports:
        config = config_from(args).worker
        log_to_stderr(config.log_level)
        from workers.main import run_worker

        code = run_worker(config, reports=reports)
    exit_at_once(code)
