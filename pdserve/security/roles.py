"""Which roles may call which gRPC method. A certificate or a token gives a caller its role."""

from __future__ import annotations

import hmac
import logging
import time
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
    from collections.abc import Awaitable, Callable, Sequence

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


# A session is no gRPC method, and is guarded as if it were one.
SESSION = "/pdserve.v1.Worker/Session"
# By method, else by service; None is everyone. What has no entry is closed to everyone.
_ALLOWED: dict[str, frozenset[Party] | None] = {
    "/pdserve.v1.Generation": None,  # checks API keys itself
    "/grpc.health.v1.Health": None,
    "/grpc.reflection.v1alpha.ServerReflection": None,
    "/pdserve.v1.Registry": frozenset({Party.WORKER}),
    "/pdserve.v1.Registry/ListWorkers": frozenset({Party.WORKER, Party.ADMIN}),
    "/pdserve.v1.Worker": frozenset({Party.ROUTER}),
    "/pdserve.v1.Worker/GetStatus": frozenset({Party.ROUTER, Party.ADMIN}),
    "/pdserve.v1.Worker/Drain": frozenset({Party.ROUTER, Party.ADMIN}),
    "/pdserve.v1.Admin": frozenset({Party.ADMIN}),
}


def allowed(method: str) -> frozenset[Party] | None:
    """Return the roles that may call `method` (/package.Service/Method), or None for everyone."""
    service = method.rpartition("/")[0]
    return _ALLOWED.get(method, _ALLOWED.get(service, frozenset()))


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
        handler, method = await continuation(details), details.method
        if handler is None or allowed(method) is None:
            return handler
        assert not handler.request_streaming, "guarded methods take one message"
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = getattr(handler, kind)

        async def guarded(request: object, context: Context) -> object:
            try:
                self._check_call(method, context)
            except PdserveError as error:
                await rpc.abort(context, error)
            return await behaviour(request, context)  # streams are written to the context

        made: Handler = getattr(grpc, f"{kind}_rpc_method_handler")(
            guarded, handler.request_deserializer, handler.response_serializer
        )
        return made

    def _check_call(self, method: str, context: Context) -> None:
        facts = context.auth_context()
        tokens = [
            value.partition(" ")[2].strip()
            for name, value in context.invocation_metadata() or ()
            if name == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer "
        ]
        self._check(
            method,
            uris=[bytes(raw).decode("ascii", "replace") for raw in facts.get("peer_uri", ())],
            tokens=tokens,
            is_known=bool(facts.get("x509_pem_cert") or tokens),
            peer=context.peer(),
        )

    def check_session(self, transport: asyncio.BaseTransport, token: str) -> None:
        """Check who opens a session. Raises Unauthenticated or PermissionDenied."""
        certificate = transport.get_extra_info("peercert")
        names = certificate.get("subjectAltName", ()) if certificate else ()
        self._check(
            SESSION,
            uris=[value for kind, value in names if kind == "URI"],
            tokens=[token] if token else [],
            is_known=bool(certificate or token),
            peer=str(transport.get_extra_info("peername")),
        )

    def _check(
        self, method: str, *, uris: Sequence[str], tokens: Sequence[str], is_known: bool, peer: str
    ) -> None:
        """Raise unless a URI of the caller's certificate or a token gives a role that may call
        `method`. `is_known` is False for a caller who shows nothing."""
        parties = allowed(method) or frozenset()
        roles = {party for party in Party if f"{_ROLE_URI}{party}" in uris}
        for token in tokens:
            digest = digest_of(token)
            roles |= {x for known, x in self._known if hmac.compare_digest(known, digest)}
        if roles & parties:
            return
        name = method.rpartition("pdserve.v1.")[2].replace("/", ".")
        needs = f"{name} requires role {' or '.join(sorted(parties)) or '(none has access)'}"
        now = time.monotonic()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            logger.warning("rejected a call of %s by %s", name, peer)
        if not is_known:
            raise Unauthenticated(f"authentication required: {needs} (client certificate or token)")
        raise PermissionDenied(f"permission denied: {needs}")


def make_guard(access: AccessConfig, *, shared_with: Party) -> Guard | None:
    """Return the guard of a server, or None if no roles are configured. Raises ConfigError."""
    if not access.asks_for_roles:
        return None
    file = access.worker_token_file
    token = read_token(file) if file else ""
    return Guard(token, access.admin_keys, shared_with)
