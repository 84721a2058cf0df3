"""The callers of actions in the audit log (pdserve/observe/audit.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.net.sockets import join_address
from pdserve.observe.audit import Caller
from pdserve.security.keys import name_of
from router.api.http_request import authorization_of

if TYPE_CHECKING:
    import grpc.aio
    from aiohttp import web


def http_caller(request: web.BaseRequest) -> Caller:
    peer = request.transport and request.transport.get_extra_info("peername")
    return _caller(authorization_of(request), "", join_address(*peer[:2]) if peer else "")


def rpc_caller(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    metadata, facts = dict(context.invocation_metadata() or ()), context.auth_context()
    name = b" ".join(facts.get("x509_common_name", ())).decode("utf-8", "replace")
    return _caller(str(metadata.get("authorization", "")), name, str(context.peer()))


def _caller(authorization: str | None, certificate: str, address: str) -> Caller:
    if key := (authorization or "").partition(" ")[2].strip():
        return Caller(f"key {name_of(key)}", address)
    return Caller(f"certificate {certificate}" if certificate else "anyone", address)
