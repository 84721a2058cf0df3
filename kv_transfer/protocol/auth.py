"""Authentication of links between workers.

With certificates for both ends, the handshake runs inside TLS and each end must have a certificate
with the role `worker`. With a worker token, each end proves that it has it. What follows the
handshake is neither encrypted nor signed. Without either, only the random transfer ids protect KV.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import ssl
from typing import TYPE_CHECKING

from kv_transfer.errors import HandshakeRefused

if TYPE_CHECKING:
    from kv_transfer.settings import KvSettings

logger = logging.getLogger(__name__)

_WORKER_ROLE = ("URI", "urn:pdserve:role:worker")


class LinkAuth:
    """Credentials of this worker. Reads the files that the settings name; raises OSError and
    ssl.SSLError. Certificates are read again at each handshake, for they are renewed."""

    def __init__(self, settings: KvSettings) -> None:
        self._settings = settings
        self._token = b""
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
        if settings.token_file:
            with open(settings.token_file, "rb") as file:  # noqa: PTH123
                self._token = file.read().strip()
        if settings.tls_cert_file:
            self._contexts = _contexts(settings)

    def secure(self, sock: socket.socket, *, is_server: bool) -> socket.socket:
        """Return the socket for the handshake. Raises HandshakeRefused if the peer's certificate
        lacks the role `worker`."""
        if self._contexts is None:
            return sock
        try:
            self._contexts = _contexts(self._settings)
        except (OSError, ssl.SSLError) as error:
            logger.error("the TLS files of before stay in use: %s", error)
        context = self._contexts[0 if is_server else 1]
        secure = context.wrap_socket(sock, server_side=is_server)
        if _WORKER_ROLE not in (secure.getpeercert() or {}).get("subjectAltName", ()):
            secure.close()
            raise HandshakeRefused("the peer's certificate does not have the role worker")
        return secure

    def finish(self, sock: socket.socket) -> socket.socket:
        """Return the socket for what follows the handshake. Both ends must call it."""
        if not isinstance(sock, ssl.SSLSocket):
            return sock
        timeout = sock.gettimeout()
        plain = socket.socket(fileno=sock.unwrap().detach())
        plain.settimeout(timeout)
        return plain

    def nonce(self) -> bytes:
        return secrets.token_bytes(16)

    def prove(self, role: str, *parts: bytes) -> bytes:
        """Sign the nonces and ids of a handshake as `producer` or `consumer`."""
        if not self._token:
            return b""
        return hmac.digest(
            self._token, b"\0".join((b"pdserve kv", role.encode(), *parts)), "sha256"
        )

    def check(self, proof: bytes, role: str, *parts: bytes) -> None:
        """Raises HandshakeRefused if `proof` is not what `prove` returns."""
        if not hmac.compare_digest(proof, self.prove(role, *parts)):
            raise HandshakeRefused("permission denied: the peer does not have our worker token")


def _contexts(settings: KvSettings) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client."""
    return _context(settings, True), _context(settings, False)


def _context(settings: KvSettings, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # a worker is known by its role; it may have any address
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    context.load_verify_locations(settings.tls_ca_file)
    return context
