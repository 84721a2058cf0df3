"""Keeps a worker registered with its routers.

register ──► renew every third of the lease ──► register again if the router does not know us
   └─ refused: fatal, unless         └─ router away: retry, with growing pauses
      another router has accepted; our token refused: fatal after `refused_token_s`

Registrations are calls of gRPC. Renewals are frames of the link that the router has opened; calls
only if it has none or acknowledges none there, as routers of older versions.

The set of routers may change if it is looked up by name or in a file (pdserve/net/discovery.py).
The worker registers with a new router. A router that is no longer listed may still stream answers
of this worker, so the worker stays registered until the router stops answering, at most for
`leave_after_s`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from pdserve import wire
from pdserve.errors import ConfigError
from pdserve.net import rpc
from pdserve.net.backoff import backoff
from pdserve.net.discovery import Discovery
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from workers.link.worker_state import registration_to_pb, renewal_to_pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.types import Account, Role, WorkerInfo
    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub
    from workers.link.router_link import OpenLinks
    from workers.link.worker_state import WorkerState
    from workers.metering.worker_account import WorkerAccount

logger = logging.getLogger(__name__)

# Longest wait for routers to acknowledge an announcement. They answer in milliseconds.
ANNOUNCE_S = 1.0
_RPC_S = 5.0
_DEREGISTER_S = 2.0
_TOKEN_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    *_TOKEN_REFUSALS,
)


class RegistrationRefused(ConfigError):
    """A router refused this worker; the message has its reason."""


@dataclass(frozen=True, slots=True)
class RegistrationTiming:
    """Times in seconds. `look_up_s`: between two look-ups of the list of routers. `leave_after_s`:
    stay of the worker at a router that is no longer listed. `refused_token_s`: the worker's or the
    router's token file may be about to change, so until then another try may succeed.
    `min_pause_s`, `max_pause_s`: between two attempts to reach a router."""

    look_up_s: float = 1.0
    leave_after_s: float = 600.0  # default of router.request_timeout_s, when answers have ended
    refused_token_s: float = 180.0
    min_pause_s: float = 0.1
    max_pause_s: float = 5.0


_TIMING = RegistrationTiming()


@dataclass(slots=True, eq=False)
class Registration:
    """The worker at one router. `known`: the info that this router has acknowledged. `router_id`:
    of the link that takes renewals; "" for a router of an older version. `answered`: set when the
    next call to the router has ended, or there will be none. `unlisted_since`: loop time since
    which the router is not listed."""

    address: str
    known: WorkerInfo | None = None
    router_id: str = ""
    lease_s: float = 0.0
    is_reachable: bool = False
    unlisted_since: float | None = None
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    due: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
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

    def __init__(
        self,
        entries: Sequence[str],
        links: OpenLinks,
        *,
        dialer: rpc.Dialer = rpc.PLAIN,
        timing: RegistrationTiming = _TIMING,
    ) -> None:
        """`entries`: the value of `worker.routers`."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.info: WorkerInfo
        self._state: Callable[[], WorkerState]
        self._account: WorkerAccount
        self._links = links
        self._numbers = itertools.count(1)  # of renewals
        self._dialer = dialer
        self._timing = timing
        self._discovery = Discovery(tuple(entries))
        self._was_accepted = False
        self._began = asyncio.get_running_loop().time()  # start of the registration
        self._changed = asyncio.Event()  # replaced at each change
        self._routers: dict[str, tuple[Registration, asyncio.Task[NoReturn]]] = {}
        self._finding: asyncio.Task[None] | None = None

    def start(
        self, info: WorkerInfo, state: Callable[[], WorkerState], account: WorkerAccount
    ) -> None:
        """Register in the background. `state` is read for each call to a router."""
        self.info, self._state, self._account = info, state, account
        self._began = asyncio.get_running_loop().time()
        self._finding = asyncio.create_task(self._find(), name="router-discovery")
        self._finding.add_done_callback(self._ended)

    async def _find(self) -> None:
        """Register with the listed routers, and follow changes of the list. Raises ConfigError for
        an invalid list."""
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
                unlisted_s = now() - router.unlisted_since
                if not router.is_reachable or unlisted_s > self._timing.leave_after_s:
                    await self._leave(router)
            self._notify()
            if not self._discovery.changes:
                return
            await asyncio.sleep(self._timing.look_up_s)

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
    def has_started(self) -> bool:
        return self._finding is not None

    @property
    def is_connected(self) -> bool:
        """True if a reachable router knows the worker."""
        return any(router.is_reachable and router.known is not None for router in self._all)

    async def changed(self) -> None:
        """Wait until `is_connected` may have changed."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def registered(self) -> None:
        """Wait until all listed routers, at least one, know the worker."""
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
        """Report the state and wait until every reachable router has answered."""
        answers = [router.answered for router in self._all if router.is_reachable]
        self.renew()
        for event in answers:
            await event.wait()

    async def announce(self, within_s: float = ANNOUNCE_S) -> None:
        """Report the state and wait until the routers know it, at most `within_s`: a hanging router
        is notified later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.renewed()

    def change_role(self, role: Role) -> None:
        """Register with every router again, in another role."""
        if self.has_started:
            self.info = replace(self.info, role=role)
            self.renew()

    async def stop(self, failure: str = "") -> None:
        """Stop renewing and deregister from every router that knows the worker, with `failure`, if
        any. Idempotent."""
        known = [router for router in self._all if router.registered.is_set()]
        tasks: list[asyncio.Task[Any]] = [task for _, task in self._routers.values()]
        tasks += [] if self._finding is None else [self._finding]
        # A cancelled renewal may or may not have reported the worker's time to the router.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEREGISTER_S):
                for router in self._all:
                    await router.calling.acquire()
        self._routers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._deregister(router.address, failure) for router in known))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_result(error)

    async def _keep(self, router: Registration) -> NoReturn:
        """Register and renew until cancelled. Raises RegistrationRefused."""
        pauses = self._pauses()
        try:
            while True:
                try:
                    await self._renew(router)
                except grpc.aio.AioRpcError as error:
                    if router.is_reachable:
                        pauses = self._pauses()
                    router.is_reachable = False
                    self._notify()
                    if router.known is not None and error.code() is grpc.StatusCode.NOT_FOUND:
                        logger.info("router %s does not know us: registering again", router.address)
                        router.known = None
                        continue
                    self._check_refusal(router, error)
                    wait_s = next(pauses)
                    what = (router.address, error.code().name, error.details(), wait_s)
                    logger.warning("router %s: %s (%s); next try in %.1f s", *what)
                    await asyncio.sleep(wait_s)
        finally:
            router.answered.set()

    async def _renew(self, router: Registration) -> NoReturn:
        """Register and renew over one channel until a call fails. Raises AioRpcError."""
        async with self._dialer.open_channel(router.address) as channel:
            stub = RegistryStub(channel)
            while True:
                await self._call(router, stub)
                router.is_reachable = True
                self._notify()
                await router._pause(router.lease_s / 3)

    def _check_refusal(self, router: Registration, error: grpc.aio.AioRpcError) -> None:
        """Raise RegistrationRefused if a router refuses the worker and none has accepted it. After
        that, a refusal is the fault of one router, and may be temporary."""
        code, waited_s = error.code(), asyncio.get_running_loop().time() - self._began
        may_change = code in _TOKEN_REFUSALS and self._dialer.file_tokens is not None
        if may_change and waited_s < self._timing.refused_token_s:
            return
        if router.known is None and code in _REFUSALS and not self._was_accepted:
            reason = rpc.error_from_rpc(error)
            text = f"router {router.address} refused this worker: {reason.message}"
            raise RegistrationRefused(text, field=reason.field) from error

    async def _call(self, router: Registration, stub: RegistryAsyncStub) -> None:
        """Register, or renew if the router knows this info."""
        answered, router.answered = router.answered, asyncio.Event()
        try:
            if router.known is not self.info:
                await self._register(router, stub)
                return
            async with router.calling:
                with self._claimed() as account:
                    number = next(self._numbers)
                    renewal = renewal_to_pb(self.info, self._state(), account, number)
                    router.lease_s = await self._renewed_lease(router, stub, renewal)
        finally:
            answered.set()

    async def _register(self, router: Registration, stub: RegistryAsyncStub) -> None:
        info, metadata = self.info, self._dialer.metadata
        router.known = None
        router.registered.clear()
        request = registration_to_pb(info, self._state())
        reply = await stub.Register(request, timeout=_RPC_S, metadata=metadata)
        router.known, router.lease_s, router.router_id = info, reply.lease_s, reply.router_id
        router.registered.set()
        self._was_accepted = True
        logger.info("registered with router %s", router.address)

    async def _renewed_lease(
        self, router: Registration, stub: RegistryAsyncStub, renewal: w.RenewRequest
    ) -> float:
        """Renew over the link, or else by a call. Return the lease in seconds."""
        if (link := self._links.of_router(router.router_id)) is not None:
            # Early enough that the call is in time if other frames hold up the link.
            lease_s = await link.renew(renewal, min(_RPC_S, router.lease_s / 3))
            if lease_s is not None:
                return lease_s
        renewed = await stub.Renew(renewal, timeout=_RPC_S, metadata=self._dialer.metadata)
        return renewed.lease_s

    @contextmanager
    def _claimed(self) -> Iterator[Account]:
        """Yield one router's share of the unreported time. Keep it for the next call if this one
        fails."""
        routers = sum(router.is_reachable for router in self._all)
        account = self._account.claim(asyncio.get_running_loop().time(), routers)
        try:
            yield account
        except grpc.aio.AioRpcError:
            self._account.give_back(account)
            raise

    async def _deregister(self, address: str, failure: str = "") -> None:
        """Leave a router. If that fails, the lease ends by itself."""
        request = w.DeregisterRequest(
            worker_id=self.info.worker_id, instance_id=self.info.instance_id, failure=failure
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

    def _pauses(self) -> Iterator[float]:
        return backoff(self._timing.min_pause_s, self._timing.max_pause_s, jitter=True)
