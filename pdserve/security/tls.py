"""Credentials of gRPC servers and channels, TLS contexts of sockets, and the worker token.

Files are checked when a process starts: they must be readable PEM, the key must belong to the
certificate, and the certificate must be valid now. Errors are ConfigError with the key `at`.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from cryptography import x509

from pdserve.config import refuse
from pdserve.rpc import PLAIN, Dialer

if TYPE_CHECKING:
    from pdserve.config import AccessConfig, HttpTlsConfig, TlsConfig

MIN_TOKEN_CHARS = 32


def server_credentials(tls: TlsConfig, at: str = "access.tls") -> grpc.ServerCredentials | None:
    """Return the credentials of a gRPC server, or None without TLS."""
    if not tls.cert_file:
        return None
    chain, key = _read_pair(tls.cert_file, tls.key_file, at)
    ca = _read_ca(tls.ca_file, f"{at}.ca_file") if tls.is_mutual else None
    return grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=ca, require_client_auth=tls.is_mutual
    )


def dialer(access: AccessConfig, at: str = "access") -> Dialer:
    """Return how a router or a worker connects to the others."""
    token, tls = "", access.tls
    if access.worker_token_file:
        token = read_token(access.worker_token_file, f"{at}.worker_token_file")
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
    """Return how to connect with TLS to peers whose certificate `ca_file`, or a public CA, signed.
    With `cert_file` this process presents a certificate."""
    ca = _read_ca(ca_file, f"{at}.ca_file") if ca_file else None
    chain, key = _read_pair(cert_file, key_file, at) if cert_file else (None, None)
    context = ssl.create_default_context(cadata=None if ca is None else ca.decode("ascii"))
    if cert_file:
        context.load_cert_chain(cert_file, key_file)
    return Dialer(grpc.ssl_channel_credentials(ca, key, chain), peer_name, token, context)


def server_context(tls: TlsConfig, at: str = "access.tls") -> ssl.SSLContext | None:
    """Return the context of a socket that listens for sessions, or None without TLS."""
    ca_file = tls.ca_file if tls.is_mutual else ""
    return _listening(tls.cert_file, tls.key_file, ca_file, at) if tls.cert_file else None


def http_context(tls: HttpTlsConfig, at: str = "access.http_tls") -> ssl.SSLContext | None:
    """Return the context of the HTTP listener, or None without TLS."""
    if not tls.cert_file:
        return None
    context = _listening(tls.cert_file, tls.key_file, tls.ca_file, at)
    context.set_alpn_protocols(["http/1.1"])
    return context


def read_token(path: str, at: str) -> str:
    """Return the worker token in a file. Errors do not repeat the file's content."""
    token = _read(path, at).decode("ascii", "replace").strip()
    usable = token.isascii() and token.isprintable() and " " not in token
    if len(token) < MIN_TOKEN_CHARS or not usable:
        refuse(at, f"{path} must hold one line of at least {MIN_TOKEN_CHARS} printable characters")
    return token


def _listening(cert_file: str, key_file: str, ca_file: str, at: str) -> ssl.SSLContext:
    """With `ca_file`, clients must present a certificate that it signed."""
    _read_pair(cert_file, key_file, at)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert_file, key_file)
    if ca_file:
        context.load_verify_locations(cadata=_read_ca(ca_file, f"{at}.ca_file").decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(path: str, at: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        refuse(at, f"cannot read {path}: {error.strerror or error}")


def _read_pair(cert_file: str, key_file: str, at: str) -> tuple[bytes, bytes]:
    """Return the certificate chain and its private key."""
    chain, key = _read(cert_file, f"{at}.cert_file"), _read(key_file, f"{at}.key_file")
    certificate = _certificates(chain, cert_file, f"{at}.cert_file")[0]
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        end = certificate.not_valid_after_utc
        refuse(f"{at}.cert_file", f"{cert_file}: certificate has expired ({end:%F})")
    if certificate.not_valid_before_utc > now:
        begin = certificate.not_valid_before_utc
        refuse(f"{at}.cert_file", f"{cert_file}: certificate is not valid before {begin:%F}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cert_file, key_file, password=lambda: ""
        )
    except ssl.SSLError as error:
        wrong = "is not a private key in PEM, or is encrypted"
        if "MISMATCH" in (error.reason or ""):
            wrong = f"is not the key of {cert_file}"
        refuse(f"{at}.key_file", f"{key_file} {wrong}")
    return chain, key


def _read_ca(path: str, at: str) -> bytes:
    """Return CA certificates in PEM, of which at least one has not expired."""
    text = _read(path, at)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ends = [x.not_valid_after_utc for x in _certificates(text, path, at)]
    context.load_verify_locations(cadata=text.decode("ascii"))
    if not context.get_ca_certs():
        refuse(at, f"{path} holds no CA certificate")
    if max(ends) < datetime.now(UTC):
        refuse(at, f"{path}: certificate has expired ({max(ends):%F})")
    return text


def _certificates(text: bytes, path: str, at: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        refuse(at, f"{path} is not a certificate in PEM")
