"""Keeps a worker registered with its routers.

register ──► renew every third of the lease ──► register again if the router does not know us
   └─ refused: fatal, unless         └─ router away: retry, with growing pauses
      another router has accepted

Routers that are found by a name or in a file (pdserve/discovery.py) come and go. The worker
registers with a new one. One that is no longer listed may still stream answers that this worker
computes, so the worker stays there until the router does not answer, for LEAVE_AFTER_S at most.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from pdserve import rpc, wire
from pdserve.discovery import Discovery
from pdserve.errors import ConfigError
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.types import Account, Role, WorkerInfo
    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub
    from workers.accounting import WorkerAccount

    # Returns a renewal with the worker's state; its ids are set here.
    State = Callable[[], w.RenewRequest]

logger = logging.getLogger(__name__)

_RPC_S = 5.0
_LOOK_UP_EVERY_S = 1.0
LEAVE_AFTER_S = 600.0  # the default of router.request_timeout_s: answers have ended by then
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


@dataclass(slots=True, eq=False)
class Registration:
    """The worker at one router. `known` is what the router has of it, None if it knows nothing;
    `told` is set when the next call to the router is over, or there will be none; `unlisted_since`
    is the loop's time since which the router is not listed."""

    address: str
    known: WorkerInfo | None = None
    is_reachable: bool = False
    unlisted_since: float | None = None
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    due: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    calling: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def _pause(self, seconds: float) -> None:
        """Wait until the next renewal is due."""
        try:
            async with asyncio.timeout(seconds):
                await self.due.wait()
        except TimeoutError:
            return
        self.due.clear()


class Registrations:
    """One worker at all its routers. `failed` gets the error that ends the worker: a refusal while
    no router has accepted it, or routers that cannot be looked up."""

    def __init__(self, entries: Sequence[str], *, dialer: rpc.Dialer = rpc.PLAIN) -> None:
        """`entries` are those of `worker.routers`."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.info: WorkerInfo
        self._state: State
        self._account: WorkerAccount
        self._dialer = dialer
        self._discovery = Discovery(tuple(entries))
        self._was_accepted = False
        self._changed = asyncio.Event()  # of a moment: the next change has another one
        self._routers: dict[str, tuple[Registration, asyncio.Task[NoReturn]]] = {}
        self._finding: asyncio.Task[None] | None = None

    def start(self, info: WorkerInfo, state: State, account: WorkerAccount) -> None:
        """Register in the background."""
        self.info, self._state, self._account = info, state, account
        self._finding = asyncio.create_task(self._find(), name="router-discovery")
        self._finding.add_done_callback(self._ended)

    async def _find(self) -> None:
        """Register with the routers that are listed, now and later. Raises ConfigError for a list
        that cannot be read as one."""
        now = asyncio.get_running_loop().time
        while True:
            listed = await self._discovery.addresses()
            for address in listed:
                if address not in self._routers:
                    router = Registration(address)
                    task = asyncio.create_task(self._keep(router), name=f"registration-{address}")
                    task.add_done_callback(self._ended)
                    self._routers[address] = router, task
            for router, _ in [*self._routers.values()]:
                if router.address in listed:
                    router.unlisted_since = None
                    continue
                if router.unlisted_since is None:
                    router.unlisted_since = now()
                if not router.is_reachable or now() - router.unlisted_since > LEAVE_AFTER_S:
                    await self._leave(router)
            self._notify()
            if not self._discovery.changes:
                return
            await asyncio.sleep(_LOOK_UP_EVERY_S)

    async def _leave(self, router: Registration) -> None:
        logger.info("leaving router %s, which is no longer listed", router.address)
        _, task = self._routers.pop(router.address)
        task.cancel()
        if router.is_reachable:
            await self._deregister(router.address)

    @property
    def _all(self) -> list[Registration]:
        return [router for router, _ in self._routers.values()]

    @property
    def is_connected(self) -> bool:
        """True if a router that answers knows the worker."""
        return any(router.is_reachable and router.known is not None for router in self._all)

    async def changed(self) -> None:
        """Wait until `is_connected` may have changed."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def registered(self) -> None:
        """Wait until every router that is listed, and at least one, knows the worker."""
        while True:
            listed = [router for router in self._all if router.unlisted_since is None]
            if listed and all(router.registered.is_set() for router in listed):
                return
            await self.changed()

    def renew(self) -> None:
        """Report the worker's state to every router now."""
        for router in self._all:
            router.due.set()

    async def renewed(self) -> None:
        """Report the state and wait until every router that can be reached has answered."""
        told = [router.told for router in self._all if router.is_reachable]
        self.renew()
        for event in told:
            await event.wait()

    def change_role(self, role: Role) -> None:
        """Register with every router again, in another role."""
        if self._finding is not None:
            self.info = replace(self.info, role=role)
            self.renew()

    async def stop(self) -> None:
        """Stop renewing and leave every router that knows the worker. Idempotent."""
        known = [router for router in self._all if router.registered.is_set()]
        tasks: list[asyncio.Task[Any]] = [task for _, task in self._routers.values()]
        tasks += [] if self._finding is None else [self._finding]
        # A renewal that is cut off may have told the router of the worker's time, or not.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEREGISTER_S):
                for router in self._all:
                    await router.calling.acquire()
        self._routers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._deregister(router.address) for router in known))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_result(error)

    async def _keep(self, router: Registration) -> NoReturn:
        """Register and renew until cancelled. Raises RegistrationRefused."""
        pause_s = 0.0
        try:
            while True:
                try:
                    await self._renew(router)
                except grpc.aio.AioRpcError as error:
                    if router.is_reachable:
                        pause_s = 0.0
                    router.is_reachable = False
                    self._notify()
                    if router.known is not None and error.code() is grpc.StatusCode.NOT_FOUND:
                        logger.info("router %s does not know us: registering again", router.address)
                        router.known = None
                        continue
                    self._check_refusal(router, error)
                    pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, pause_s * 2))
                    # Jitter, so that workers do not all return to a router at the same moment.
                    wait_s = pause_s * random.uniform(0.5, 1.0)
                    what = (router.address, error.code().name, error.details(), wait_s)
                    logger.warning("router %s: %s (%s); next try in %.1f s", *what)
                    await asyncio.sleep(wait_s)
        finally:
            router.told.set()

    async def _renew(self, router: Registration) -> NoReturn:
        """Register and renew over one channel until a call fails. Raises AioRpcError."""
        async with self._dialer.open_channel(router.address) as channel:
            stub = RegistryStub(channel)
            while True:
                lease_s = await self._tell(router, stub)
                router.is_reachable = True
                self._notify()
                await router._pause(lease_s / 3)

    def _check_refusal(self, router: Registration, error: grpc.aio.AioRpcError) -> None:
        """Raises RegistrationRefused for a router that refuses the worker, if none has accepted
        it. Later this is the fault of one router, and may pass."""
        if router.known is None and error.code() in _REFUSALS and not self._was_accepted:
            reason = rpc.error_from_rpc(error)
            text = f"router {router.address} refused this worker: {reason.message}"
            raise RegistrationRefused(text, field=reason.field) from error

    async def _tell(self, router: Registration, stub: RegistryAsyncStub) -> float:
        """Register, or renew if the router knows this info. Return the lease in seconds."""
        told, router.told = router.told, asyncio.Event()
        try:
            return await self._call(router, stub)
        finally:
            told.set()

    async def _call(self, router: Registration, stub: RegistryAsyncStub) -> float:
        info, state, metadata = self.info, self._state(), self._dialer.metadata
        if router.known is info:
            state.worker_id, state.instance_id = info.worker_id, info.instance_id
            async with router.calling:
                with self._claimed() as account:
                    state.account.CopyFrom(wire.account_to_pb(account))
                    renewed = await stub.Renew(state, timeout=_RPC_S, metadata=metadata)
            return renewed.lease_s
        router.known = None
        router.registered.clear()
        request = w.RegisterRequest(
            worker=wire.worker_to_pb(info), draining=state.draining, adapters=state.adapters
        )
        reply = await stub.Register(request, timeout=_RPC_S, metadata=metadata)
        router.known = info
        router.registered.set()
        self._was_accepted = True
        logger.info("registered with router %s", router.address)
        return reply.lease_s

    @contextmanager
    def _claimed(self) -> Iterator[Account]:
        """Yield what one router is to be told of the worker's time, and keep it for the next call
        if this one fails."""
        routers = sum(router.is_reachable for router in self._all)
        account = self._account.claim(asyncio.get_running_loop().time(), routers)
        try:
            yield account
        except grpc.aio.AioRpcError:
            self._account.give_back(account)
            raise

    async def _deregister(self, address: str) -> None:
        """Leave a router. If that fails, the lease ends by itself."""
        request = w.DeregisterRequest(
            worker_id=self.info.worker_id, instance_id=self.info.instance_id
        )
        async with self._dialer.open_channel(address) as channel:
            try:
                with self._claimed() as account:
                    request.account.CopyFrom(wire.account_to_pb(account))
                    await RegistryStub(channel).Deregister(
                        request, timeout=_DEREGISTER_S, metadata=self._dialer.metadata
                    )
            except grpc.aio.AioRpcError as error:
                logger.warning("leaving router %s failed: %s", address, error.code().name)
