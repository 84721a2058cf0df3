"""A worker as a process: signals, exit codes, and what it reports to whoever started it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve.local.child import Reports
from pdserve.local.gpus import gpu_environment
from workers.cores import pin
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from pdserve.config import WorkerConfig
    from workers.engine import Engine

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_worker(config: WorkerConfig, *, reports: Reports | None = None) -> int:
    """Serves until SIGTERM, SIGINT or a drain that is to stop it, and then drains; a second signal
    ends the drain. Returns the exit
    code: 0 after a stop that was asked for, 1 when the engine or the registration failed.

    Raises ConfigError for a configuration that cannot be served.
    """
    pin(config.cores)
    os.environ.update(gpu_environment(config.gpus))
    import uvloop

    return uvloop.run(serve_worker(config, reports=reports))


async def serve_worker(
    config: WorkerConfig, *, reports: Reports | None = None, engine: Engine | None = None
) -> int:
    """`run_worker` in a loop that is running, on its main thread. `engine` is for tests."""
    reports = reports or Reports(None)
    server = WorkerServer(config, engine=engine)
    with closing(_Stops()) as stops:
        try:
            reports.doing(f"loading {config.served_model_name}")
            if not await _unless(stops, server.start()):
                return EXIT_OK
            failure = await _serve(server, reports, stops)
            if failure is None:
                await _unless(stops, server.drain(config.drain_timeout_s, stop=True))
                return EXIT_OK
        except ConfigError:
            raise
        except Exception as error:
            logger.exception("the engine did not start")
            failure = f"the engine did not start: {error}"
        finally:
            # What is left takes no time; whoever is in a hurry may kill us now.
            stops.close()
            await server.stop()
    logger.error("%s", failure)
    reports.failed(failure)
    return EXIT_FAILED


async def _serve(server: WorkerServer, reports: Reports, stops: _Stops) -> str | None:
    """Waits for a stop (None) or for what ends this worker otherwise, in words."""
    info = server.info
    logger.info("worker %s (%s) serves at %s", info.worker_id, info.role, info.address)
    reports.doing("registering")
    ends: set[asyncio.Future[Any]] = {server.failed, server.refused, server.told_to_stop}
    if await _unless(stops, _first(server.registered(), ends)) and not any(x.done() for x in ends):
        reports.ready(
            {
                "worker_id": info.worker_id,
                "role": info.role,
                "address": info.address,
                "debug": info.debug_address,
            }
        )
        await _unless(stops, asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED))
    if server.failed.done():
        return f"the engine died: {server.failed.result()}"
    if server.refused.done():
        return str(server.refused.result())
    return None


class _Stops:
    """Signals that ask this process to stop. State: those not yet taken."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._asked.put_nowait, number)

    async def next(self) -> signal.Signals:
        return await self._asked.get()

    def close(self) -> None:
        """From now on signals do what they do by default. Idempotent."""
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)


async def _first(what: Coroutine[Any, Any, None], ends: Iterable[asyncio.Future[Any]]) -> None:
    """Waits for `what` or for one of `ends`."""
    task = asyncio.ensure_future(what)
    try:
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()


async def _unless(stops: _Stops, what: Coroutine[Any, Any, object]) -> bool:
    """Awaits `what`, unless a stop comes first: then it is cancelled, and this is False."""
    task, stop = asyncio.ensure_future(what), asyncio.ensure_future(stops.next())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return False
        task.result()
        return True
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)
