"""Authentication of links between workers.

With certificates for both ends, the handshake runs inside TLS and each end must have a certificate
of our CA with the role `worker`. With a worker token, each end proves that it holds the token. With
`tls` of the settings, TLS goes on for everything after the handshake; otherwise that is neither
encrypted nor signed. Without certificates and token, only the random transfer ids protect KV.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import ssl
from typing import TYPE_CHECKING

from kv_transfer.errors import HandshakeRefused, LinkClosed
from kv_transfer.protocol.tls_stream import TlsStream
from pdserve.security.files import FileTokens

if TYPE_CHECKING:
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)

_PROOF_BYTES = 32
_TLS_HANDSHAKE = b"\x16"  # the first byte
_WORKER_ROLE = ("URI", "urn:pdserve:role:worker")


class LinkAuth:
    """Credentials of this worker. Reads the files named in the settings; raises ConfigError,
    OSError and ssl.SSLError. Reads them again at each handshake, because they are renewed."""

    def __init__(self, settings: ConnectorConfig) -> None:
        self._settings = settings
        self._tokens: FileTokens | None = None
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
        if settings.token_file:
            self._tokens = FileTokens(settings.token_file, "access.worker_token_file")
        if settings.tls_cert_file:
            self._contexts = _contexts(settings)

    def lacks_tls(self, sock: socket.socket) -> bool:
        """Return True if we have certificates and this consumer does not begin with TLS."""
        if self._contexts is None:
            return False
        return sock.recv(1, socket.MSG_PEEK) not in (_TLS_HANDSHAKE, b"")

    def secure(self, sock: socket.socket, *, is_server: bool) -> TlsStream | None:
        """Begin TLS for the handshake; return None without certificates. Raises HandshakeRefused if
        the peer does not use TLS, or has no certificate of our CA with the role `worker`."""
        if self._contexts is None:
            return None
        try:
            self._contexts = _contexts(self._settings)
        except (OSError, ssl.SSLError) as error:
            logger.error("cannot reload the TLS files, so the old ones stay in use: %s", error)
        tls = TlsStream(sock, self._contexts[0 if is_server else 1], is_server=is_server)
        try:
            certificate = tls.begin(self._settings.handshake_timeout_s)
        except (ssl.SSLError, ConnectionError, LinkClosed) as error:
            reason = "worker.access.tls must be set at both workers, with the same CA"
            raise HandshakeRefused(f"no TLS connection ({error}): {reason}") from error
        if _WORKER_ROLE not in certificate.get("subjectAltName", ()):
            raise HandshakeRefused("the peer's certificate does not have the role worker")
        return tls

    def nonce(self) -> bytes:
        return secrets.token_bytes(16)

    def prove(self, role: str, *parts: bytes) -> bytes:
        """Sign the nonces and ids of a handshake as `producer` or `consumer`, with each valid
        token, because the peer may not know all of them."""
        return b"".join(self._proofs(role, *parts))

    def _proofs(self, role: str, *parts: bytes) -> list[bytes]:
        text = b"\0".join((b"pdserve kv", role.encode(), *parts))
        tokens = () if self._tokens is None else self._tokens.now()
        return [hmac.digest(token.encode(), text, "sha256") for token in tokens]

    def check(self, proof: bytes, role: str, *parts: bytes) -> None:
        """Raise HandshakeRefused if `proof` has none of the signatures of `prove`."""
        ours, theirs = self._proofs(role, *parts), _pieces(proof)
        if (ours or theirs) and not any(hmac.compare_digest(a, b) for a in ours for b in theirs):
            raise HandshakeRefused("permission denied: the peer does not have our worker token")


def _pieces(proof: bytes) -> list[bytes]:
    return [proof[i : i + _PROOF_BYTES] for i in range(0, len(proof), _PROOF_BYTES)]


def _contexts(settings: ConnectorConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the server and of the client."""
    return _context(settings, True), _context(settings, False)


def _context(settings: ConnectorConfig, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the role identifies a worker; its address may change
    context.verify_mode = ssl.CERT_REQUIRED
    # OpenSSL chooses its first suite of TLS 1.3, AES-256-GCM.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if is_server:
        context.num_tickets = 0  # links do not resume sessions
    context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    context.load_verify_locations(settings.tls_ca_file)
    return context
