"""Which roles may call which gRPC method. A certificate or a token gives a caller its role.

A method without an entry is closed to everyone.
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
from pdserve.errors import PdserveError, PermissionDenied, Unauthenticated
from pdserve.security.keys import digest_in, digest_of
from pdserve.security.tls import read_token

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from pdserve.config import AccessConfig

    Context = grpc.aio.ServicerContext[Any, Any]
    Details = grpc.HandlerCallDetails
    Handler = grpc.RpcMethodHandler[Any, Any]

logger = logging.getLogger(__name__)

_ROLE_URI = "urn:pdserve:role:"
_LOG_EVERY_S = 1.0


class Party(StrEnum):
    """Role of a caller that is more than a client."""

    WORKER = "worker"
    ROUTER = "router"
    ADMIN = "admin"


_EVERYONE: frozenset[Party] | None = None
_OPEN = (
    "pdserve.v1.Generation",  # checks API keys itself
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
)
_SERVICES = {
    "pdserve.v1.Registry": frozenset({Party.WORKER}),
    "pdserve.v1.Worker": frozenset({Party.ROUTER}),
    "pdserve.v1.Admin": frozenset({Party.ADMIN}),
}
# A session is no gRPC method, and is guarded as if it were one.
SESSION = "/pdserve.v1.Worker/Session"
_METHODS = {
    "/pdserve.v1.Registry/ListWorkers": frozenset({Party.WORKER, Party.ADMIN}),
    "/pdserve.v1.Worker/GetStatus": frozenset({Party.ROUTER, Party.ADMIN}),
    "/pdserve.v1.Worker/Drain": frozenset({Party.ROUTER, Party.ADMIN}),
}


def allowed(method: str) -> frozenset[Party] | None:
    """Return the roles that may call `method` (/package.Service/Method), or None for everyone."""
    service = method.rpartition("/")[0].removeprefix("/")
    if service in _OPEN:
        return _EVERYONE
    return _METHODS.get(method) or _SERVICES.get(service, frozenset())


class Guard(grpc.aio.ServerInterceptor):
    """Rejects calls before they are read. `shared_with` is the role of those who hold the worker
    token: workers for a router, routers for a worker."""

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
        """End the RPC unless its caller has one of the roles `parties`."""
        facts = context.auth_context()
        uris = [bytes(raw).decode("ascii", "replace") for raw in facts.get("peer_uri", ())]
        tokens = [
            value.partition(" ")[2].strip()
            for name, value in context.invocation_metadata() or ()
            if name == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer "
        ]
        try:
            self.check_caller(
                method,
                parties,
                uris=uris,
                tokens=tokens,
                has_shown=bool(facts.get("x509_pem_cert")),
                peer=context.peer(),
            )
        except PdserveError as error:
            await rpc.abort(context, error)

    def check_session(self, transport: asyncio.BaseTransport, token: str) -> None:
        """Check who opens a session. Raises Unauthenticated or PermissionDenied."""
        certificate = transport.get_extra_info("peercert")
        names = certificate.get("subjectAltName", ()) if certificate else ()
        self.check_caller(
            SESSION,
            _SERVICES["pdserve.v1.Worker"],
            uris=[value for kind, value in names if kind == "URI"],
            tokens=[token] if token else [],
            has_shown=bool(certificate),
            peer=str(transport.get_extra_info("peername")),
        )

    def check_caller(
        self,
        method: str,
        parties: frozenset[Party],
        *,
        uris: Iterable[str],
        tokens: Sequence[str],
        has_shown: bool,
        peer: str,
    ) -> None:
        """Raise Unauthenticated or PermissionDenied unless the caller has one of the roles
        `parties`. `uris` are those of its certificate; `has_shown` is True if it has one."""
        roles: set[Party] = set()
        for uri in uris:
            name = uri.removeprefix(_ROLE_URI)
            roles |= {party for party in Party if party.value == name}
        for token in tokens:
            digest = digest_of(token)
            roles |= {x for known, x in self._known if hmac.compare_digest(known, digest)}
        if roles & parties:
            return
        name = method.rpartition("pdserve.v1.")[2].replace("/", ".")
        needs = f"{name} requires role {' or '.join(sorted(parties)) or '(none has access)'}"
        self._log(name, peer)
        if not (has_shown or tokens):
            raise Unauthenticated(f"authentication required: {needs} (client certificate or token)")
        raise PermissionDenied(f"permission denied: {needs}")

    def _log(self, name: str, peer: str) -> None:
        now = time.monotonic()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            logger.warning("rejected a call of %s by %s", name, peer)

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


def make_guard(access: AccessConfig, *, shared_with: Party, at: str = "access") -> Guard | None:
    """Return the guard of a server, or None if no roles are configured. Raises ConfigError."""
    if not access.asks_for_roles:
        return None
    file = access.worker_token_file
    token = read_token(file, f"{at}.worker_token_file") if file else ""
    return Guard(token, access.admin_keys, shared_with)


def guards(
    access: AccessConfig, *, shared_with: Party, at: str = "access"
) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Return the guard of a server as interceptors for gRPC. Raises ConfigError."""
    guard = make_guard(access, shared_with=shared_with, at=at)
    return () if guard is None else (guard,)
