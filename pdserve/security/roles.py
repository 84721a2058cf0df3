"""Authorization: the roles that each gRPC method accepts. A caller's role comes from its
certificate or token."""

from __future__ import annotations

import hmac
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pdserve.config import is_exposed, refuse
from pdserve.errors import PdserveError, PermissionDenied, Unauthenticated
from pdserve.net import rpc
from pdserve.security.files import FileTokens
from pdserve.security.keys import digest_in, digest_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from pdserve.config import AccessConfig

    Context = grpc.aio.ServicerContext[Any, Any]
    Details = grpc.HandlerCallDetails
    Handler = grpc.RpcMethodHandler[Any, Any]

logger = logging.getLogger(__name__)

_ROLE_URI = "urn:pdserve:role:"
_LOG_EVERY_S = 1.0


class Party(StrEnum):
    """Role of a caller with more rights than a client."""

    WORKER = "worker"
    ROUTER = "router"
    ADMIN = "admin"
    PEER = "peer"  # a router of another region


# A session is not a gRPC call; this name lets it use the same table.
SESSION = "/pdserve.v1.Worker/Session"
# Roles by method, or by service for methods without an entry. None: every caller. No entry at all:
# no caller.
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
    "/pdserve.v1.Peer": frozenset({Party.PEER, Party.ROUTER}),
}


def allowed(method: str) -> frozenset[Party] | None:
    """Return the roles that may call `method` (/package.Service/Method). None: every caller."""
    service = method.rpartition("/")[0]
    return _ALLOWED.get(method, _ALLOWED.get(service, frozenset()))


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that rejects unauthorized calls before their message is read. `shared_with`: the
    role of callers with the worker token, which is WORKER at a router and ROUTER at a worker."""

    def __init__(self, access: AccessConfig, shared_with: Party) -> None:
        """Raises ConfigError."""
        self._files: list[tuple[FileTokens, Party]] = []
        for key, party in (
            ("worker_token_file", shared_with),
            ("admin_key_file", Party.ADMIN),
            ("peer_token_file", Party.PEER),  # of routers alone
        ):
            if path := getattr(access, key, ""):
                self._files.append((FileTokens(path, f"access.{key}"), party))
        self.admin_keys = access.admin_keys
        self._logged_at = 0.0

    def _known(self) -> Iterator[tuple[bytes, Party]]:
        for text in self.admin_keys:
            yield digest_in(text), Party.ADMIN
        for file, party in self._files:
            for token in file.now():
                yield digest_of(token), party

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

    def check_link(self, transport: asyncio.BaseTransport, token: str) -> None:
        """Check the role of a caller that opens a session. `token`: its tokens, one a line. Raises
        Unauthenticated or PermissionDenied."""
        self._check(
            SESSION,
            uris=_uris_of(transport),
            tokens=token.split(),
            is_known=bool(transport.get_extra_info("peercert") or token),
            peer=str(transport.get_extra_info("peername")),
        )

    def _check(
        self, method: str, *, uris: Sequence[str], tokens: Sequence[str], is_known: bool, peer: str
    ) -> None:
        """Raise unless a URI of the caller's certificate or one of its tokens has a role that may
        call `method`. `is_known` is False for a caller without credentials."""
        parties = allowed(method) or frozenset()
        roles = {party for party in Party if f"{_ROLE_URI}{party}" in uris}
        for token in tokens:
            digest = digest_of(token)
            roles |= {x for known, x in self._known() if hmac.compare_digest(known, digest)}
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


def _uris_of(transport: asyncio.BaseTransport) -> list[str]:
    """Return the URIs in the subjectAltName of the peer's certificate."""
    certificate = transport.get_extra_info("peercert") or {}
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]


def check_peer(transport: asyncio.BaseTransport, party: Party) -> None:
    """Check that the certificate of a peer that we connected to has the role `party`. Raises
    PermissionDenied."""
    if f"{_ROLE_URI}{party}" not in _uris_of(transport):
        raise PermissionDenied(f"its certificate does not have the role {party}")


def make_guard(access: AccessConfig, *, shared_with: Party, host: str) -> Guard | None:
    """Return the guard of a server at `host`. Return None if no roles are configured, with a
    warning if other machines can reach `host`. Raises ConfigError."""
    if not access.asks_for_roles:
        for key in ("admin_keys", "admin_key_file", "peer_token_file"):
            if getattr(access, key, ""):
                refuse(
                    f"access.{key}",
                    "needs access.worker_token_file, or access.tls.ca_file with client "
                    "certificates: workers must authenticate too once roles are checked; "
                    "`pdserve up` makes a token",
                )
        if is_exposed(host):
            keys = "access.worker_token_file or access.tls.ca_file"
            logger.warning("any client that can reach %s controls this process: set %s", host, keys)
        return None
    return Guard(access, shared_with)
