"""Credentials of gRPC servers and channels, TLS contexts of sockets, and the worker token.

Files are checked when a process starts: they must be readable PEM, the key must belong to the
certificate, and the certificate must be valid now. Errors are ConfigError with the key, below `at`.
They are read again when a connection is made after they have changed. New files with an error are
not used, and the log says why.
"""

from __future__ import annotations

import logging
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from cryptography import x509

from pdserve.config import refuse
from pdserve.errors import ConfigError
from pdserve.rpc import PLAIN, Dialer, LoadedTls

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import AccessConfig, HttpTlsConfig, TlsConfig

logger = logging.getLogger(__name__)

MIN_TOKEN_CHARS = 32


class _Files:
    """What `load` makes of the files at `paths`, made again when they have changed."""

    def __init__(self, load: Callable[[], LoadedTls], paths: tuple[str, ...]) -> None:
        self._load, self._paths = load, [path for path in paths if path]
        self._lock = threading.Lock()  # gRPC asks in threads of its own
        self._seen = self._state()
        self._loaded = load()

    def now(self) -> LoadedTls:
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen = state
                try:
                    self._loaded = self._load()
                    logger.info("read again: %s", ", ".join(self._paths))
                except ConfigError as error:
                    logger.error("the TLS files of before stay in use: %s", error)
            return self._loaded

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_changed(path) for path in self._paths]


def _changed(path: str) -> tuple[int, ...] | None:
    """Return what is another value when the file is another one."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """Return the credentials of a gRPC server, or None without TLS."""
    files = _server(tls, tls.ca_file if tls.is_mutual else "", "access.tls")
    if files is None:
        return None
    used = files.now()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Is called at each handshake. None: nothing has changed."""
        nonlocal used
        before, used = used, files.now()
        return None if used is before else _configuration(used)

    first = _configuration(used)
    # The stub does not know of None.
    return grpc.dynamic_ssl_server_credentials(first, renewed, tls.is_mutual)  # type: ignore[arg-type]


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Return the context of a socket that listens for sessions, or None without TLS."""
    return _renewing(_server(tls, tls.ca_file if tls.is_mutual else "", "access.tls"))


def http_context(tls: HttpTlsConfig) -> ssl.SSLContext | None:
    """Return the context of the HTTP listener, or None without TLS."""
    return _renewing(_server(tls, tls.ca_file, "access.http_tls", alpn=("http/1.1",)))


def _configuration(loaded: LoadedTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.ca)


def _renewing(files: _Files | None) -> ssl.SSLContext | None:
    """Return a server's context, which hands each connection to the context of that moment."""
    if files is None:
        return None

    def choose(connection: ssl.SSLObject, *_: object) -> None:
        connection.context = files.now().context

    context = files.now().context
    context.sni_callback = choose  # called for clients that name no host too
    return context


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

    def load() -> LoadedTls:
        # The default one knows the public CAs.
        context = ssl.create_default_context()
        if ca_file:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return _load(context, cert_file, key_file, ca_file, at)

    return Dialer(_Files(load, (cert_file, key_file, ca_file)).now, peer_name, token)


def read_token(path: str, at: str = "access") -> str:
    """Return the worker token in a file. Errors do not repeat the file's content."""
    at = f"{at}.worker_token_file"
    token = _read(path, at).decode("ascii", "replace").strip()
    usable = token.isascii() and token.isprintable() and " " not in token
    if len(token) < MIN_TOKEN_CHARS or not usable:
        refuse(at, f"{path} must hold one line of at least {MIN_TOKEN_CHARS} printable characters")
    return token


def _server(tls: HttpTlsConfig, ca_file: str, at: str, alpn: tuple[str, ...] = ()) -> _Files | None:
    """With `ca_file`, clients must present a certificate that it signed."""
    if not tls.cert_file:
        return None

    def load() -> LoadedTls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if ca_file:
            context.verify_mode = ssl.CERT_REQUIRED
        if alpn:
            context.set_alpn_protocols(alpn)
        return _load(context, tls.cert_file, tls.key_file, ca_file, at)

    return _Files(load, (tls.cert_file, tls.key_file, ca_file))


def _load(
    context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str, at: str
) -> LoadedTls:
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
    return LoadedTls(context, ca, key, chain)


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
