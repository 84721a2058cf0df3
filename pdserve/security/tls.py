"""Credentials of gRPC servers and channels, and TLS contexts of sockets.

Files are checked when a process starts: they must be readable PEM, the key must belong to the
certificate, and the certificate must be valid now. Errors are ConfigError with the configuration
key, below `at`. Changed files are read again at the next connection. If they have an error, the old
ones stay in use; the error is logged and counted in a metric.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from cryptography import x509
from prometheus_client.registry import Collector

from pdserve.config import RouterAccessConfig, refuse
from pdserve.net.rpc import PLAIN, Dialer, LoadedTls
from pdserve.observe.metrics import family
from pdserve.security.files import FileTokens, WatchedFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from pdserve.config import AccessConfig, HttpTlsConfig, TlsConfig
_WHAT = "TLS files"


class CertificateCollector(Collector):
    """Exports the expiry of the certificates for new connections, and the number of file changes
    that were rejected. Each scrape reloads changed files."""

    def __init__(self, access: AccessConfig) -> None:
        """Raises ConfigError naming the key of an unusable file."""
        tls = access.tls
        found = {"access.tls": _server(tls, tls.ca_file, "access.tls")}
        if isinstance(access, RouterAccessConfig):
            http, at = access.http_tls, "access.http_tls"
            found[at] = _server(http, http.ca_file, at)
        self._files = {at: files for at, files in found.items() if files is not None}

    def collect(self) -> Iterator[Metric]:
        ends = [files.now().not_after.items() for files in self._files.values()]
        yield family("tls_not_after_seconds", [((key,), end) for x in ends for key, end in x])
        errors = [((at,), files.errors) for at, files in self._files.items()]
        yield family("tls_file_errors", errors)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """Return the credentials of a gRPC server, or None without TLS."""
    files = _server(tls, tls.ca_file if tls.is_mutual else "", "access.tls")
    if files is None:
        return None
    used = files.now()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return new credentials, or None if they have not changed. gRPC calls this at each
        handshake."""
        nonlocal used
        before, used = used, files.now()
        return None if used is before else _configuration(used)

    first = _configuration(used)
    # The type stub does not allow None.
    return grpc.dynamic_ssl_server_credentials(first, renewed, tls.is_mutual)  # type: ignore[arg-type]


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Return the TLS context for the listener of sessions, or None without TLS."""
    return _renewing(_server(tls, tls.ca_file if tls.is_mutual else "", "access.tls"))


def http_context(tls: HttpTlsConfig) -> ssl.SSLContext | None:
    """Return the TLS context for the HTTP listener, or None without TLS."""
    return _renewing(_server(tls, tls.ca_file, "access.http_tls", alpn=("http/1.1",)))


def _configuration(loaded: LoadedTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.ca)


def _renewing(files: WatchedFiles[LoadedTls] | None) -> ssl.SSLContext | None:
    """Return a server context that switches each new connection to the current context of
    `files`."""
    if files is None:
        return None

    def choose(connection: ssl.SSLObject, *_: object) -> None:
        connection.context = files.now().context

    context = files.now().context
    context.sni_callback = choose  # is also called for clients that send no server name
    return context


def dialer(access: AccessConfig, at: str = "access") -> Dialer:
    """Return the dialer for connections between routers and workers."""
    tokens, tls = None, access.tls
    if access.worker_token_file:
        tokens = FileTokens(access.worker_token_file, f"{at}.worker_token_file")
    if not tls.cert_file:
        return Dialer(file_tokens=tokens) if tokens else PLAIN
    found = tls_dialer(
        ca_file=tls.ca_file,
        cert_file=tls.cert_file,
        key_file=tls.key_file,
        peer_name=tls.peer_name,
        at=f"{at}.tls",
    )
    # If there is a token, it gives the role, so certificates need none.
    return replace(found, file_tokens=tokens, checks_roles=tls.is_mutual and tokens is None)


def tls_dialer(
    *,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    peer_name: str = "",
    token: str = "",
    at: str = "tls",
) -> Dialer:
    """Return a dialer that connects with TLS. A peer's certificate must be signed by `ca_file`, or
    by a public CA if that is empty. With `cert_file` this process presents a certificate."""

    def load() -> LoadedTls:
        # The default context trusts the public CAs.
        context = ssl.create_default_context()
        if ca_file:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return _load(context, cert_file, key_file, ca_file, at)

    files = WatchedFiles(load, (cert_file, key_file, ca_file), _WHAT)
    return Dialer(files.now, peer_name, token)


def _server(
    tls: HttpTlsConfig, ca_file: str, at: str, alpn: tuple[str, ...] = ()
) -> WatchedFiles[LoadedTls] | None:
    """Return the server's files, or None without TLS. With `ca_file`, clients must present a
    certificate that it signed."""
    if not tls.cert_file:
        return None

    def load() -> LoadedTls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if ca_file:
            context.verify_mode = ssl.CERT_REQUIRED
        if alpn:
            context.set_alpn_protocols(alpn)
        return _load(context, tls.cert_file, tls.key_file, ca_file, at)

    return WatchedFiles(load, (tls.cert_file, tls.key_file, ca_file), _WHAT)


def _load(
    context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str, at: str
) -> LoadedTls:
    """Check the named files and load them into `context`. Raises ConfigError."""
    ca, key, chain, not_after = None, b"", b"", {}
    if ca_file:
        ca, known = _read_certificates(ca_file, f"{at}.ca_file")
        context.load_verify_locations(cadata=ca.decode("ascii"))
        if not context.get_ca_certs():
            refuse(f"{at}.ca_file", f"{ca_file} holds no CA certificate")
        last = max(known, key=lambda x: x.not_valid_after_utc)
        not_after[f"{at}.ca_file"] = _check_dates(last, ca_file, f"{at}.ca_file")
    if cert_file:
        chain, known = _read_certificates(cert_file, f"{at}.cert_file")
        not_after[f"{at}.cert_file"] = _check_dates(known[0], cert_file, f"{at}.cert_file")
        key = _read(key_file, f"{at}.key_file")
        try:
            context.load_cert_chain(cert_file, key_file, password=lambda: "")
        except ssl.SSLError as error:
            wrong = "is not a private key in PEM, or is encrypted"
            if "MISMATCH" in (error.reason or ""):
                wrong = f"is not the key of {cert_file}"
            refuse(f"{at}.key_file", f"{key_file} {wrong}")
    return LoadedTls(context, ca, key, chain, not_after)


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


def _check_dates(certificate: x509.Certificate, path: str, at: str) -> float:
    """Return the expiry of the certificate, in seconds since 1970."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= datetime.now(UTC) <= end:
        refuse(at, f"{path}: certificate has expired, or is not valid yet ({begin:%F} to {end:%F})")
    return end.timestamp()
