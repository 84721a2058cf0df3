"""Authentication of links between workers.

With certificates for both ends, the handshake runs inside TLS and each end must have a certificate
with the role `worker`. With a worker token, each end proves that it holds the token. Traffic after
the handshake is neither encrypted nor signed. Without certificates and token, only the random
transfer ids protect KV.
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
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)

_WORKER_ROLE = ("URI", "urn:pdserve:role:worker")


class LinkAuth:
    """Credentials of this worker. Reads the files named in the settings; raises OSError and
    ssl.SSLError. Certificates are read again at each handshake, because they are renewed."""

    def __init__(self, settings: ConnectorConfig) -> None:
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
            logger.error("cannot reload the TLS files, so the old ones stay in use: %s", error)
        context = self._contexts[0 if is_server else 1]
        secure = context.wrap_socket(sock, server_side=is_server)
        if _WORKER_ROLE not in (secure.getpeercert() or {}).get("subjectAltName", ()):
            secure.close()
            raise HandshakeRefused("the peer's certificate does not have the role worker")
        return secure

    def finish(self, sock: socket.socket) -> socket.socket:
        """Return the plain socket for the traffic after the handshake. Both ends must call it."""
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
        """Raise HandshakeRefused if `proof` differs from the result of `prove`."""
        if not hmac.compare_digest(proof, self.prove(role, *parts)):
            raise HandshakeRefused("permission denied: the peer does not have our worker token")


def _contexts(settings: ConnectorConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the server and of the client."""
    return _context(settings, True), _context(settings, False)


def _context(settings: ConnectorConfig, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the role identifies a worker; its address may change
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    context.load_verify_locations(settings.tls_ca_file)
    return context
