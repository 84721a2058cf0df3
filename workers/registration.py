"""Keeps a worker registered with the routers that it was told of.

register ──► renew every third of the lease ──► register again when the router does not know us
   └─ refused: fatal                 └─ router away: try on, with growing pauses
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc
import grpc.aio

from pdserve import rpc, wire
from pdserve.errors import ConfigError
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.capability import CapabilityKey
    from pdserve.types import KvReport, WorkerInfo, WorkerLoad
    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

logger = logging.getLogger(__name__)

_RPC_S = 5.0
_DEREGISTER_S = 2.0
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class RegistrationRefused(ConfigError):
    """A router will not have this worker; the message has its reason."""


class LoadSource(Protocol):
    """What a renewal reports."""

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_moving(self) -> bool: ...

    @property
    def unhealthy(self) -> str: ...

    def load(self) -> WorkerLoad | None: ...

    def kv_report(self) -> KvReport | None: ...


@dataclass(slots=True)
class Backoff:
    """Growing pauses with jitter, so that workers do not come back to a router all at once."""

    min_s: float = 0.1
    max_s: float = 5.0
    _next_s: float = 0.0

    def pause_s(self) -> float:
        """The next pause."""
        self._next_s = min(self.max_s, max(self.min_s, self._next_s * 2))
        return self._next_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = 0.0


class Registration:
    """One worker at one router. State: one task, and whether the router knows us. `kv_key` is
    shared with the router, so that it can make capabilities for this worker's KV."""

    def __init__(
        self,
        address: str,
        info: WorkerInfo,
        source: LoadSource,
        *,
        kv_key: CapabilityKey | None = None,
        dialer: rpc.Dialer = rpc.PLAIN,
    ) -> None:
        self._dialer = dialer
        self.address = address
        self.registered = asyncio.Event()
        self._info = self._told = info
        self._source = source
        self._kv_key = kv_key
        self._nudged = asyncio.Event()
        self._is_heard = False
        self._untold: list[asyncio.Future[None]] = []
        self._backoff = Backoff()

    async def run(self) -> NoReturn:
        """Registers and renews until cancelled. Raises RegistrationRefused."""
        async with self._dialer.open_channel(self.address) as channel:
            stub = RegistryStub(channel)
            while True:
                lease_s = await self._register(stub)
                self.registered.set()
                logger.info("registered with router %s", self.address)
                try:
                    await self._renew(stub, lease_s)
                finally:
                    self.registered.clear()

    def nudge(self) -> None:
        """Renews now: something that the router should know has changed."""
        self._nudged.set()

    async def told(self) -> None:
        """Waits until the router knows what is so now, or could not be told; at once where it is
        away. Has no deadline."""
        if self.registered.is_set() and self._is_heard:
            told = asyncio.get_running_loop().create_future()
            self._untold.append(told)
            self.nudge()
            await told

    def announce(self, info: WorkerInfo) -> None:
        """Registers anew, as `info`."""
        self._info = info
        self._nudged.set()

    async def deregister(self) -> None:
        """Tells the router that the worker leaves; its lease ends anyway where that fails. Call it
        once `run` has ended."""
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

    async def _register(self, stub: RegistryAsyncStub) -> float:
        """Tries until the router takes us; returns the lease in seconds."""
        while True:
            info = self._info
            request = wire.registration_to_pb(info, self._kv_key)
            request.draining = self._source.is_draining
            try:
                reply = await stub.Register(request, timeout=_RPC_S, metadata=self._dialer.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    reason = rpc.error_from_rpc(error)
                    raise RegistrationRefused(
                        f"router {self.address} refused this worker: {reason.message}",
                        field=reason.field,
                    ) from error
                await self._wait_for_router(error)
            else:
                self._backoff.reset()
                self._told = info
                return reply.lease_s

    async def _renew(self, stub: RegistryAsyncStub, lease_s: float) -> None:
        """Keeps the lease alive; returns when the router does not know us any more, or not as what
        we are now."""
        self._is_heard = True
        while self._told is self._info:
            if self._is_heard:
                await self._pause(lease_s / 3)
            if self._told is not self._info:
                return
            untold, self._untold = self._untold, []
            failure: grpc.aio.AioRpcError | None = None
            request = self._renewal()
            try:
                reply = await stub.Renew(request, timeout=_RPC_S, metadata=self._dialer.metadata)
                lease_s = reply.lease_s
                self._backoff.reset()
            except grpc.aio.AioRpcError as error:
                failure = error
            finally:
                for told in untold:
                    if not told.done():
                        told.set_result(None)
            self._is_heard = failure is None
            if failure is None:
                continue
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                logger.info("router %s does not know us: registering again", self.address)
                return
            await self._wait_for_router(failure)

    def _renewal(self) -> w.RenewRequest:
        load, kv = self._source.load(), self._source.kv_report()
        return w.RenewRequest(
            worker_id=self._info.worker_id,
            instance_id=self._info.instance_id,
            load=None if load is None else wire.load_to_pb(load),
            draining=self._source.is_draining,
            moving=self._source.is_moving,
            unhealthy=self._source.unhealthy,
            kv=None if kv is None else wire.kv_report_to_pb(kv),
        )

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._nudged.wait()
        except TimeoutError:
            return
        self._nudged.clear()

    async def _wait_for_router(self, error: grpc.aio.AioRpcError) -> None:
        pause_s = self._backoff.pause_s()
        logger.warning(
            "router %s: %s (%s); next try in %.1f s",
            self.address,
            error.code().name,
            error.details(),
            pause_s,
        )
        await asyncio.sleep(pause_s)


class Registrations:
    """One worker at all its routers. `refused` gets the error of the first router that refuses."""

    def __init__(
        self,
        addresses: Iterable[str],
        info: WorkerInfo,
        source: LoadSource,
        *,
        kv_key: CapabilityKey | None = None,
        dialer: rpc.Dialer = rpc.PLAIN,
    ) -> None:
        self.refused: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._all = [
            Registration(address, info, source, kv_key=kv_key, dialer=dialer)
            for address in addresses
        ]
        self._tasks: list[asyncio.Task[NoReturn]] = []

    def start(self) -> None:
        for registration in self._all:
            task = asyncio.create_task(
                registration.run(), name=f"registration-{registration.address}"
            )
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    async def registered(self) -> None:
        """Waits until every router knows the worker."""
        for registration in self._all:
            await registration.registered.wait()

    def nudge(self) -> None:
        for registration in self._all:
            registration.nudge()

    async def told(self) -> None:
        """Waits until every router that can be reached knows what is so now. Has no deadline."""
        await asyncio.gather(*(registration.told() for registration in self._all))

    def announce(self, info: WorkerInfo) -> None:
        for registration in self._all:
            registration.announce(info)

    async def stop(self) -> None:
        """Stops renewing and leaves every router that knew us. Idempotent."""
        known = [x for x in self._all if x.registered.is_set()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(x.deregister() for x in known))

    def _ended(self, task: asyncio.Task[NoReturn]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.refused.done():
            self.refused.set_result(error)
