"""Options of gRPC channels and servers, and errors as statuses.

An error is sent as a status with a serialised `pdserve.v1.Error` in the trailing metadata, from
which the caller restores its class, field and retry time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve import errors, wire
from pdserve.v1 import common_pb2

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

ERROR_METADATA_KEY = "pdserve-error-bin"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# On one connection.
MAX_STREAMS = 4096
HANDSHAKE_S = 15.0
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0

Options = list[tuple[str, Any]]


def _common_options(keepalive_s: float, max_received_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        # The second is for all pings, and a minute by default: a stream that receives nothing waits
        # for it. A peer that holds its GIL still answers.
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # The default of 2 stops the pings of an idle stream.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(*, keepalive_s: float = KEEPALIVE_S) -> Options:
    """Return the options of every channel that we open."""
    return [
        *_common_options(keepalive_s),
        # Closing a channel must close its connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Despite its name this is the timeout of one attempt.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(
    *, keepalive_s: float = KEEPALIVE_S, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Options:
    """Return the options of every server that we start. With gRPC's defaults a server answers the
    pings of an idle stream with GOAWAY; this one accepts twice the rate of our channels."""
    return [
        *_common_options(keepalive_s, max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive_s * 500)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        # Otherwise two processes could share one port by mistake.
        ("grpc.so_reuseport", 0),
    ]


def authorization(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that authenticates the caller; none without a key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class LoadedTls(NamedTuple):
    """A context, and the PEM files loaded into it."""

    context: ssl.SSLContext
    ca: bytes | None
    key: bytes = b""
    chain: bytes = b""


@dataclass(frozen=True, slots=True)
class Dialer:
    """How this process connects to others.

    `tls` returns what connections made now use, and is None without TLS; `peer_name` is the name in
    the others' certificates, if it is not the host; `token` is the worker token.
    """

    tls: Callable[[], LoadedTls] | None = None
    peer_name: str = ""
    token: str = field(default="", repr=False)

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context of a session that is opened now."""
        return None if self.tls is None else self.tls().context

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of calls that require a role."""
        return authorization(self.token)

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to `address` (host:port), which the caller closes. It keeps the
        certificate of now when it connects again."""
        options = channel_options()
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        _, ca, key, chain = self.tls()
        credentials = grpc.ssl_channel_credentials(ca, key or None, chain or None)
        if self.peer_name:
            options.append(("grpc.ssl_target_name_override", self.peer_name))
        return grpc.aio.secure_channel(address, credentials, options=options)


PLAIN = Dialer()
open_channel = PLAIN.open_channel


def make_server(
    guard: grpc.aio.ServerInterceptor | None = None, *, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Server:
    """Return a server without ports or services, which the caller starts and stops."""
    return grpc.aio.server(
        interceptors=[guard] if guard else [],
        options=server_options(max_message_bytes=max_message_bytes),
    )


def listen(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Return the port of `server`. Raises RuntimeError if it cannot listen at `address`."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: errors.PdserveError,
    *,
    status: grpc.StatusCode | None = None,
) -> NoReturn:
    """End the RPC with the status of `error` (or with `status`) and the error as metadata."""
    payload = wire.error_to_pb(error).SerializeToString()
    await context.abort(
        status or error.grpc_status,
        error.message,
        trailing_metadata=((ERROR_METADATA_KEY, payload),),
    )
    raise AssertionError("abort returned")


def _sent(error: grpc.aio.AioRpcError) -> common_pb2.Error | None:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            with suppress(DecodeError):
                return common_pb2.Error.FromString(value)
    return None


def has_error(error: grpc.aio.AioRpcError) -> bool:
    """Return True if the peer sent one of our errors, so that the connection did not fail."""
    return _sent(error) is not None


def error_from_rpc(error: grpc.aio.AioRpcError) -> errors.PdserveError:
    """Return the error that the peer raised, or without our metadata the closest to its status."""
    sent = _sent(error)
    if sent is not None:
        return errors.from_info(wire.error_from_pb(sent))
    cls = errors.BY_STATUS.get(error.code(), errors.InternalError)
    return cls(error.details() or error.code().name.lower().replace("_", " "))
