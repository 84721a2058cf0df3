"""From the configuration of TLS to what gRPC and asyncio want for it."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import grpc

from pdserve.access.certificates import read_ca, read_pair
from pdserve.access.token import read_token
from pdserve.rpc import PLAIN, Dialer

if TYPE_CHECKING:
    from pdserve.config import AccessConfig, HttpTlsConfig, TlsConfig


def server_credentials(tls: TlsConfig, at: str = "access.tls") -> grpc.ServerCredentials | None:
    """What a gRPC server listens with; None without TLS. Raises ConfigError naming the key, under
    `at`."""
    if not tls.cert_file:
        return None
    pair = read_pair(tls.cert_file, tls.key_file, at, as_server=True)
    ca = read_ca(tls.ca_file, f"{at}.ca_file") if tls.is_mutual else None
    return grpc.ssl_server_credentials(
        [(pair.key, pair.chain)], root_certificates=ca, require_client_auth=tls.is_mutual
    )


def dialer(access: AccessConfig, at: str = "access") -> Dialer:
    """How a router or a worker reaches the others. Raises ConfigError naming the key."""
    token = ""
    if access.worker_token_file:
        token = read_token(access.worker_token_file, f"{at}.worker_token_file")
    tls = access.tls
    if not tls.cert_file:
        return Dialer(token=token) if token else PLAIN
    return tls_dialer(
        ca_file=tls.ca_file,
        cert_file=tls.cert_file,
        key_file=tls.key_file,
        peer_name=tls.peer_name,
        token=token,
        at=f"{at}.tls",
    )


def tls_dialer(
    *,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    peer_name: str = "",
    token: str = "",
    at: str = "tls",
) -> Dialer:
    """TLS to whoever has a certificate of `ca_file`, or of a public CA; with a certificate of one's
    own where there is one. Raises ConfigError."""
    ca = read_ca(ca_file, f"{at}.ca_file") if ca_file else None
    pair = read_pair(cert_file, key_file, at, as_server=False) if cert_file else None
    credentials = grpc.ssl_channel_credentials(
        ca, None if pair is None else pair.key, None if pair is None else pair.chain
    )
    context = ssl.create_default_context(cadata=None if ca is None else ca.decode("ascii"))
    if pair is not None:
        context.load_cert_chain(cert_file, key_file)
    return Dialer(credentials, peer_name, token, context)


def server_context(tls: TlsConfig, at: str = "access.tls") -> ssl.SSLContext | None:
    """Return the context of a socket that listens for sessions, or None without TLS. Raises
    ConfigError naming the key."""
    ca_file = tls.ca_file if tls.is_mutual else ""
    return _listening(tls.cert_file, tls.key_file, ca_file, at) if tls.cert_file else None


def http_context(tls: HttpTlsConfig, at: str = "access.http_tls") -> ssl.SSLContext | None:
    """Return the context of the HTTP listener, or None without TLS. Raises ConfigError naming the
    key."""
    if not tls.cert_file:
        return None
    context = _listening(tls.cert_file, tls.key_file, tls.ca_file, at)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _listening(cert_file: str, key_file: str, ca_file: str, at: str) -> ssl.SSLContext:
    """With `ca_file`, clients need a certificate that it has signed."""
    read_pair(cert_file, key_file, at, as_server=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert_file, key_file)
    if ca_file:
        context.load_verify_locations(cadata=read_ca(ca_file, f"{at}.ca_file").decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
