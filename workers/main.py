"""A worker as a process: cores, signals, exit codes, and reports to the process that started it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from typing import TYPE_CHECKING, Any

from pdserve.config import MOVE_S, UNPIN_S
from pdserve.errors import ConfigError
from pdserve.model.hub import with_directories
from pdserve.process.child import TAKE_REQUESTS, Reports
from pdserve.process.gpus import gpu_environment
from workers.make_engine import make_engine, vllm_settings
from workers.server import WorkerServer
from workers.vllm.ranks.follower import run_follower
from workers.vllm.start import settings

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from pdserve.config import WorkerConfig

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Read once, when the libraries behind torch and numpy are loaded.
_THREAD_POOLS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def run_worker(config: WorkerConfig, *, reports: Reports | None = None) -> int:
    """Serve until a signal, or a drain that stops the process; then drain. A second signal ends the
    drain. Return 0 after a requested stop, 1 if engine or registration failed.

    Raises ConfigError for a configuration that cannot be served.
    """
    pin(config.cores, thread_pools=not config.gpus)
    os.environ.update(gpu_environment(config.gpus))
    settings.prepare_ranks(config.engine_args)
    if config.nodes.rank:
        return _run_follower(with_directories(config), reports or Reports(None))
    import uvloop

    return uvloop.run(_run(config, reports or Reports(None)))


def thread_environment(cores: Collection[int]) -> dict[str, str]:
    """Return the environment of a process with `cores`: one thread for each in every pool."""
    return dict.fromkeys(_THREAD_POOLS, str(len(cores))) if cores else {}


def pin(cores: Collection[int], *, thread_pools: bool = True) -> None:
    """Pin this process and its children to `cores`, if any, because engines of one machine that
    each start a thread for every core slow one another down. With `thread_pools`, also limit every
    thread pool to that number. vLLM on a GPU sets one thread itself, but only if OMP_NUM_THREADS is
    not set.

    Raises ConfigError for cores that this process may not use, and RuntimeError if torch is
    imported already, which is too late.
    """
    if not cores:
        return
    # A forked worker has its parent's one-thread pools; its engine sets torch's threads.
    if "torch" in sys.modules and not settings.is_preloaded:
        raise RuntimeError("cores must be pinned before torch is imported")
    if thread_pools:
        os.environ.update(thread_environment(cores))
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise ConfigError(
            f"cores: {missing} are not among those that this process may use", field="cores"
        )
    os.sched_setaffinity(0, cores)


def _run_follower(config: WorkerConfig, reports: Reports) -> int:
    head_timeout_s = config.drain_timeout_s + MOVE_S + UNPIN_S
    failure = run_follower(vllm_settings(config), head_timeout_s, reports)
    if not failure:
        return EXIT_OK
    logger.error("node %d of the worker ended: %s", config.nodes.rank, failure)
    reports.failed(failure)
    return EXIT_FAILED


async def _run(config: WorkerConfig, reports: Reports) -> int:
    # Begins with the worker's id, because the KV plane has no other name of its peers.
    instance_id = f"{config.worker_id or config.role}-{uuid.uuid4().hex}"
    engine = make_engine(config, instance_id, reports.doing)
    server = WorkerServer(config, engine=engine, instance_id=instance_id)
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    promoted, failure = asyncio.Event(), None
    loop.add_signal_handler(TAKE_REQUESTS, promoted.set)
    try:
        serving = _serve(server, reports, config.served_names[0], promoted)
        failure = await _unless(signals, serving)
        if failure is None and server.routers.has_started:
            await _unless(signals, server.readiness.drain(config.drain_timeout_s, stop=True))
    except ConfigError:
        raise
    except Exception as error:
        logger.exception("the engine did not start")
        failure = f"the engine did not start: {error}"
    finally:
        # The rest takes no time; from now on a signal may kill the process.
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        await server.stop(failure or "")
    if failure is None:
        return EXIT_OK
    logger.error("%s", failure)
    reports.failed(failure)
    return EXIT_FAILED


async def _serve(
    server: WorkerServer, reports: Reports, model: str, promoted: asyncio.Event
) -> str | None:
    """Start and serve until a stop is requested (None) or fails (return why). A warm worker
    takes requests once it is `promoted`."""
    reports.doing(f"loading {model}")
    info = await server.start()
    logger.info("worker %s (%s) serves at %s", info.worker_id, info.role, info.address)
    reports.doing("registering")
    failed, refused = server.service.failed, server.routers.failed
    registered = asyncio.ensure_future(server.registered())
    promotion = asyncio.ensure_future(promoted.wait())
    ends: set[asyncio.Future[Any]] = {failed, refused, server.readiness.stop_requested}
    try:
        await asyncio.wait({registered, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if registered.done():
            facts = {"worker_id": info.worker_id, "role": info.role}
            reports.ready({**facts, "address": info.address, "debug": info.debug_address})
            await asyncio.wait({promotion, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if promotion.done():
                await server.readiness.undrain()
                logger.info("takes requests")
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        registered.cancel()
        promotion.cancel()
    if failed.done():
        return f"the engine died: {failed.result()}"
    return str(refused.result()) if refused.done() else None


async def _unless(signals: asyncio.Queue[signal.Signals], action: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `action`; cancel it and return None if a signal arrives first."""
    task, stop = asyncio.ensure_future(action), asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.done() else task.result()
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)
