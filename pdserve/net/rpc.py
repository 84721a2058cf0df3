"""gRPC channels and servers, and conversion of errors to gRPC statuses.

An error is sent as a status with a serialised `pdserve.v1.Error` in the trailing metadata. The
caller restores its class, field and Retry-After from it.
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
    from collections.abc import Callable, Mapping

    from pdserve.security.files import FileTokens

ERROR_METADATA_KEY = "pdserve-error-bin"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_STREAMS = 4096  # per connection
HANDSHAKE_S = 15.0
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0

Options = list[tuple[str, Any]]


def _common_options(keepalive_s: float, max_received_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        # Both timeouts are needed: the second applies to all pings, and its default of a minute
        # would delay the detection of a dead peer on an idle stream. gRPC answers pings without the
        # GIL, so a busy peer does not time out.
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # 0: no limit. With the default of 2, gRPC stops pinging on an idle stream.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(*, keepalive_s: float = KEEPALIVE_S) -> Options:
    """Return the options of a client channel."""
    return [
        *_common_options(keepalive_s),
        # With the global pool, a connection may outlive its channel.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Despite its name, this is the timeout of one connection attempt.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Connections within a service must not use the proxy in the environment.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(
    *, keepalive_s: float = KEEPALIVE_S, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Options:
    """Return the options of a server. It accepts pings at twice the rate that our channels send.
    With gRPC's defaults it would close a connection with frequent pings (GOAWAY)."""
    return [
        *_common_options(keepalive_s, max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive_s * 500)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        # With SO_REUSEPORT, two processes could share one port by mistake.
        ("grpc.so_reuseport", 0),
    ]


def authorization(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that authenticates the caller, empty without a key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class LoadedTls(NamedTuple):
    """A TLS context and the PEM files loaded into it. `not_after`: expiry of the certificates, in
    seconds since 1970, by the configuration key of their file."""

    context: ssl.SSLContext
    ca: bytes | None
    key: bytes
    chain: bytes
    not_after: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens connections from this process to others, with its credentials.

    `tls` returns the credentials for a new connection; None means no TLS. `peer_name` is the
    expected name in the peer's certificate if it differs from the host. `token` is a key of the
    caller; without it, `file_tokens` are the worker's tokens. With `checks_roles` the peer's
    certificate must also have the expected role.
    """

    tls: Callable[[], LoadedTls] | None = None
    peer_name: str = ""
    token: str = field(default="", repr=False)
    checks_roles: bool = False
    file_tokens: FileTokens | None = field(default=None, repr=False)

    @property
    def context(self) -> ssl.SSLContext | None:
        """The current TLS context for a new session, or None without TLS."""
        return None if self.tls is None else self.tls().context

    @property
    def tokens(self) -> tuple[str, ...]:
        """All tokens that are valid now, because the peer may not know a new one yet, or an old one
        any more."""
        if self.token or self.file_tokens is None:
            return (self.token,) if self.token else ()
        return self.file_tokens.now()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of calls that require a role."""
        return tuple(x for token in self.tokens for x in authorization(token))

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to `address` (host:port), which the caller closes. When the channel
        reconnects it uses the credentials that were current when it was opened."""
        options = channel_options()
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        loaded = self.tls()
        credentials = grpc.ssl_channel_credentials(
            loaded.ca, loaded.key or None, loaded.chain or None
        )
        if self.peer_name:
            options.append(("grpc.ssl_target_name_override", self.peer_name))
        return grpc.aio.secure_channel(address, credentials, options=options)


PLAIN = Dialer()
open_channel = PLAIN.open_channel


def make_server(
    guard: grpc.aio.ServerInterceptor | None = None, *, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Server:
    """Return a server without ports or services. The caller starts and stops it."""
    return grpc.aio.server(
        interceptors=[guard] if guard else [],
        options=server_options(max_message_bytes=max_message_bytes),
    )


def listen(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Add `address` to `server` and return its port. Raises RuntimeError if it cannot listen."""
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
    """Return True if the peer itself sent this error, so the connection did not fail."""
    return _sent(error) is not None


def error_from_rpc(error: grpc.aio.AioRpcError) -> errors.PdserveError:
    """Return the error that the peer sent, or the closest one to the status if it has no pdserve
    error in its metadata."""
    sent = _sent(error)
    if sent is not None:
        return errors.from_info(wire.error_from_pb(sent))
    cls = errors.BY_STATUS.get(error.code(), errors.InternalError)
    return cls(error.details() or error.code().name.lower().replace("_", " "))
