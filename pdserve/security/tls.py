"""Credentials of gRPC servers and channels, TLS contexts of sockets, and the worker token.

Files are checked when a process starts: they must be readable PEM, the key must belong to the
certificate, and the certificate must be valid now. Errors are ConfigError with the key, below `at`.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
from cryptography import x509

from pdserve.config import refuse
from pdserve.rpc import PLAIN, Dialer

if TYPE_CHECKING:
    from pdserve.config import AccessConfig, HttpTlsConfig, TlsConfig

MIN_TOKEN_CHARS = 32


class _Loaded(NamedTuple):
    """A context, and the PEM files loaded into it."""

    context: ssl.SSLContext
    ca: bytes | None
    key: bytes = b""
    chain: bytes = b""


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """Return the credentials of a gRPC server, or None without TLS."""
    found = _server(tls, tls.ca_file if tls.is_mutual else "", "access.tls")
    if found is None:
        return None
    return grpc.ssl_server_credentials([(found.key, found.chain)], found.ca, tls.is_mutual)


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Return the context of a socket that listens for sessions, or None without TLS."""
    found = _server(tls, tls.ca_file if tls.is_mutual else "", "access.tls")
    return None if found is None else found.context


def http_context(tls: HttpTlsConfig) -> ssl.SSLContext | None:
    """Return the context of the HTTP listener, or None without TLS."""
    found = _server(tls, tls.ca_file, "access.http_tls")
    if found is None:
        return None
    found.context.set_alpn_protocols(["http/1.1"])
    return found.context


def dialer(access: AccessConfig, at: str = "access") -> Dialer:
    """Return how a router or a worker connects to the others."""
    token, tls = "", access.tls
    if access.worker_token_file:
        token = read_token(access.worker_token_file, at)
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
    # The default one knows the public CAs.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca_file else ssl.create_default_context()
    _, ca, key, chain = _load(context, cert_file, key_file, ca_file, at)
    credentials = grpc.ssl_channel_credentials(ca, key or None, chain or None)
    return Dialer(credentials, peer_name, token, context)


def read_token(path: str, at: str = "access") -> str:
    """Return the worker token in a file. Errors do not repeat the file's content."""
    at = f"{at}.worker_token_file"
    token = _read(path, at).decode("ascii", "replace").strip()
    usable = token.isascii() and token.isprintable() and " " not in token
    if len(token) < MIN_TOKEN_CHARS or not usable:
        refuse(at, f"{path} must hold one line of at least {MIN_TOKEN_CHARS} printable characters")
    return token


def _server(tls: HttpTlsConfig, ca_file: str, at: str) -> _Loaded | None:
    """With `ca_file`, clients must present a certificate that it signed."""
    if not tls.cert_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, tls.cert_file, tls.key_file, ca_file, at)


def _load(context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str, at: str) -> _Loaded:
    """Check the files that are named, and load them into `context`."""
    ca, key, chain = None, b"", b""
    if ca_file:
        ca, known = _read_certificates(ca_file, f"{at}.ca_file")
        context.load_verify_locations(cadata=ca.decode("ascii"))
        if not context.get_ca_certs():
            refuse(f"{at}.ca_file", f"{ca_file} holds no CA certificate")
        _check_dates(max(known, key=lambda x: x.not_valid_after_utc), ca_file, f"{at}.ca_file")
    if cert_file:
        chain, known = _read_certificates(cert_file, f"{at}.cert_file")
        _check_dates(known[0], cert_file, f"{at}.cert_file")
        key = _read(key_file, f"{at}.key_file")
        try:
            context.load_cert_chain(cert_file, key_file, password=lambda: "")
        except ssl.SSLError as error:
            wrong = "is not a private key in PEM, or is encrypted"
            if "MISMATCH" in (error.reason or ""):
                wrong = f"is not the key of {cert_file}"
            refuse(f"{at}.key_file", f"{key_file} {wrong}")
    return _Loaded(context, ca, key, chain)


def _read(path: str, at: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        refuse(at, f"cannot read {path}: {error.strerror or error}")


def _read_certificates(path: str, at: str) -> tuple[bytes, list[x509.Certificate]]:
    text = _read(path, at)
    try:
        return text, x509.load_pem_x509_certificates(text)
    except ValueError:
        refuse(at, f"{path} is not a certificate in PEM")


def _check_dates(certificate: x509.Certificate, path: str, at: str) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= datetime.now(UTC) <= end:
        refuse(at, f"{path}: certificate has expired, or is not valid yet ({begin:%F} to {end:%F})")
