"""Who may call which gRPC method: shown by the role in a certificate, or by a token.

A method that nobody has thought of is for nobody.
"""

from __future__ import annotations

import hmac
import inspect
import logging
import time
from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pdserve import rpc
from pdserve.access.token import read_token
from pdserve.api_keys import digest_in, digest_of
from pdserve.errors import PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.access.config import AccessConfig

    Context = grpc.aio.ServicerContext[Any, Any]
    Details = grpc.HandlerCallDetails
    Handler = grpc.RpcMethodHandler[Any, Any]

logger = logging.getLogger(__name__)

_ROLE_URI = "urn:pdserve:role:"
_LOG_EVERY_S = 1.0


class Party(StrEnum):
    """What a caller can be, beside a client."""

    WORKER = "worker"
    ROUTER = "router"
    ADMIN = "admin"


_EVERYONE: frozenset[Party] | None = None
_OPEN = (
    "pdserve.v1.Generation",  # asks for API keys itself
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
)
_SERVICES = {
    "pdserve.v1.Registry": frozenset({Party.WORKER}),
    "pdserve.v1.Worker": frozenset({Party.ROUTER}),
    "pdserve.v1.Admin": frozenset({Party.ADMIN}),
}
_METHODS = {
    "/pdserve.v1.Registry/ListWorkers": frozenset({Party.WORKER, Party.ADMIN}),
    "/pdserve.v1.Worker/GetStatus": frozenset({Party.ROUTER, Party.ADMIN}),
    "/pdserve.v1.Worker/Drain": frozenset({Party.ROUTER, Party.ADMIN}),
}


def allowed(method: str) -> frozenset[Party] | None:
    """Who may call `method` (/package.Service/Method); None for everyone."""
    service = method.rpartition("/")[0].removeprefix("/")
    if service in _OPEN:
        return _EVERYONE
    return _METHODS.get(method) or _SERVICES.get(service, frozenset())


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls before they are read. `shared_with` is who may have the worker token: workers
    at a router, routers at a worker. State: when a refusal was last logged."""

    def __init__(self, token: str, admin_keys: tuple[str, ...], shared_with: Party) -> None:
        known = [(digest_in(text), Party.ADMIN) for text in admin_keys]
        self._known = [*known, (digest_of(token), shared_with)] if token else known
        self._logged_at = 0.0

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], details: Details
    ) -> Handler | None:
        parties = allowed(details.method)
        handler = await continuation(details)
        if parties is None or handler is None:
            return handler
        return self._guarded(handler, details.method, parties)

    async def check(self, context: Context, method: str, parties: frozenset[Party]) -> None:
        """Ends the RPC unless its caller is one of `parties`."""
        roles, has_shown = self._roles(context)
        if roles & parties:
            return
        who = " or ".join(sorted(parties)) or "nobody"
        name = method.removeprefix("/")
        self._log(name, context)
        if not has_shown:
            await rpc.abort(context, Unauthenticated(f"{name} is for {who}: show who you are"))
        await rpc.abort(context, PermissionDenied(f"{name} is for {who} alone"))

    def _roles(self, context: Context) -> tuple[set[Party], bool]:
        """What the caller is, and whether it has shown anything at all."""
        roles: set[Party] = set()
        facts = context.auth_context()
        for raw in facts.get("peer_uri", ()):
            role = bytes(raw).decode("ascii", "replace").removeprefix(_ROLE_URI)
            roles |= {party for party in Party if party.value == role}
        has_shown = bool(facts.get("x509_pem_cert"))
        for name, value in context.invocation_metadata() or ():
            if name == "authorization" and isinstance(value, str):
                has_shown = True
                scheme, _, secret = value.partition(" ")
                digest = digest_of(secret.strip())
                if scheme.lower() == "bearer":
                    roles |= {x for known, x in self._known if hmac.compare_digest(known, digest)}
        return roles, has_shown

    def _log(self, name: str, context: Context) -> None:
        now = time.monotonic()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            logger.warning("%s was refused to %s", name, context.peer())

    def _guarded(self, handler: Handler, method: str, parties: frozenset[Party]) -> Handler:
        async def unary(request: object, context: Context) -> object:
            await self.check(context, method, parties)
            return await behaviour(request, context)

        async def streaming(request: object, context: Context) -> None:
            await self.check(context, method, parties)
            result = behaviour(request, context)
            if not inspect.isasyncgen(result):
                await result
                return
            async with aclosing(result) as messages:
                async for message in messages:
                    await context.write(message)

        kind = ("unary" if not handler.request_streaming else "stream") + (
            "_unary" if not handler.response_streaming else "_stream"
        )
        behaviour = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: Handler = make(
            streaming if handler.response_streaming else unary,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return guarded


def guards(
    access: AccessConfig, *, shared_with: Party, at: str = "access"
) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """The guard of a server, or none where nothing is asked for. Raises ConfigError."""
    if not access.asks_for_roles:
        return ()
    file = access.worker_token_file
    token = read_token(file, f"{at}.worker_token_file") if file else ""
    return (Guard(token, access.admin_keys, shared_with),)
