"""Keeps a worker registered with its routers.

register ──► renew every third of the lease ──► register again if the router does not know us
   └─ refused: fatal                 └─ router away: retry, with growing pauses
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio

from pdserve import rpc, wire
from pdserve.errors import ConfigError
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.types import WorkerInfo
    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

    # Returns a renewal with the worker's state; its ids are set here.
    State = Callable[[], w.RenewRequest]

logger = logging.getLogger(__name__)

_RPC_S = 5.0
_DEREGISTER_S = 2.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class RegistrationRefused(ConfigError):
    """A router refused this worker; the message has its reason."""


class Registration:
    """One worker at one router. State: as what the router knows it, if it does."""

    def __init__(self, address: str, info: WorkerInfo, state: State, *, dialer: rpc.Dialer) -> None:
        self.address = address
        self.registered = asyncio.Event()
        self._dialer = dialer
        self._info = info
        self._known_info: WorkerInfo | None = None
        self._state = state
        self._due = asyncio.Event()
        self._is_reachable = False
        self._waiters: list[asyncio.Future[None]] = []

    async def run(self) -> NoReturn:
        """Register and renew until cancelled. Raises RegistrationRefused."""
        pause_s = 0.0
        async with self._dialer.open_channel(self.address) as channel:
            stub = RegistryStub(channel)
            while True:
                waiters, self._waiters = self._waiters, []
                try:
                    lease_s = await self._tell(stub)
                except grpc.aio.AioRpcError as error:
                    self._is_reachable = False
                    if self._known_info is None and error.code() in _REFUSALS:
                        reason = rpc.error_from_rpc(error)
                        raise RegistrationRefused(
                            f"router {self.address} refused this worker: {reason.message}",
                            field=reason.field,
                        ) from error
                    if self._known_info is not None and error.code() is grpc.StatusCode.NOT_FOUND:
                        logger.info("router %s does not know us: registering again", self.address)
                        self._known_info = None
                        continue
                    pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, pause_s * 2))
                    await self._back_off(error, pause_s)
                else:
                    self._is_reachable, pause_s = True, 0.0
                finally:
                    for waiter in waiters:
                        if not waiter.done():
                            waiter.set_result(None)
                if self._is_reachable:
                    await self._pause(lease_s / 3)

    async def _tell(self, stub: RegistryAsyncStub) -> float:
        """Register, or renew if the router knows this info. Return the lease in seconds."""
        info, state, metadata = self._info, self._state(), self._dialer.metadata
        if self._known_info is info:
            state.worker_id, state.instance_id = info.worker_id, info.instance_id
            renewed = await stub.Renew(state, timeout=_RPC_S, metadata=metadata)
            return renewed.lease_s
        self._known_info = None
        self.registered.clear()
        request = w.RegisterRequest(worker=wire.worker_to_pb(info), draining=state.draining)
        reply = await stub.Register(request, timeout=_RPC_S, metadata=metadata)
        self._known_info = info
        self.registered.set()
        logger.info("registered with router %s", self.address)
        return reply.lease_s

    def renew(self) -> None:
        """Renew now."""
        self._due.set()

    async def renewed(self) -> None:
        """Renew and wait for the answer or the failure; return at once if the router is away."""
        if self._is_reachable:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self.renew()
            await waiter

    def change_info(self, info: WorkerInfo) -> None:
        """Register again, as `info`."""
        self._info = info
        self.renew()

    async def deregister(self) -> None:
        """Leave the router, once `run` has ended. If that fails, the lease ends by itself."""
        request = w.DeregisterRequest(
            worker_id=self._info.worker_id, instance_id=self._info.instance_id
        )
        async with self._dialer.open_channel(self.address) as channel:
            try:
                await RegistryStub(channel).Deregister(
                    request, timeout=_DEREGISTER_S, metadata=self._dialer.metadata
                )
            except grpc.aio.AioRpcError as error:
                logger.warning("leaving router %s failed: %s", self.address, error.code().name)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._due.wait()
        except TimeoutError:
            return
        self._due.clear()

    async def _back_off(self, error: grpc.aio.AioRpcError, pause_s: float) -> None:
        # Jitter, so that workers do not all return to a router at the same moment.
        pause_s *= random.uniform(0.5, 1.0)
        logger.warning(
            "router %s: %s (%s); next try in %.1f s",
            *(self.address, error.code().name, error.details(), pause_s),
        )
        await asyncio.sleep(pause_s)


class Registrations:
    """One worker at all its routers. `refused` gets the error of the first router that refuses."""

    def __init__(self, addresses: Iterable[str], *, dialer: rpc.Dialer = rpc.PLAIN) -> None:
        self.refused: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._dialer = dialer
        self._addresses = tuple(addresses)
        self._all: list[Registration] = []
        self._tasks: list[asyncio.Task[NoReturn]] = []

    def start(self, info: WorkerInfo, state: State) -> None:
        """Register in the background."""
        for address in self._addresses:
            registration = Registration(address, info, state, dialer=self._dialer)
            task = asyncio.create_task(registration.run(), name=f"registration-{address}")
            task.add_done_callback(self._ended)
            self._all.append(registration)
            self._tasks.append(task)

    async def registered(self) -> None:
        """Wait until every router knows the worker."""
        for registration in self._all:
            await registration.registered.wait()

    def renew(self) -> None:
        """Report the worker's state to every router now."""
        for registration in self._all:
            registration.renew()

    async def renewed(self) -> None:
        """Report the state and wait until every router that can be reached knows it."""
        await asyncio.gather(*(registration.renewed() for registration in self._all))

    def change_info(self, info: WorkerInfo) -> None:
        """Register with every router again, as `info`."""
        for registration in self._all:
            registration.change_info(info)

    async def stop(self) -> None:
        """Stop renewing and leave every router that knows the worker. Idempotent."""
        known = [x for x in self._all if x.registered.is_set()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._all.clear()
        await asyncio.gather(*(x.deregister() for x in known))

    def _ended(self, task: asyncio.Task[NoReturn]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.refused.done():
            self.refused.set_result(error)
