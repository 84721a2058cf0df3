"""The handshake of two workers on a new connection: they agree on a transport."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from kv_transfer.cache.host_memory import boot_id
from kv_transfer.errors import HandshakeRefused, KvTransferError, ProtocolError
from kv_transfer.protocol.auth import LinkAuth
from kv_transfer.protocol.link import DEAD_PEER_S
from kv_transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    RefuseHandshake,
    Select,
    Welcome,
)
from kv_transfer.protocol.transport import TransportUnavailable
from kv_transfer.settings import AUTO, LOCAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.protocol.link import ConsumerChannel, Link
    from kv_transfer.protocol.transport import LocalKv, Transport
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)


class Handshake:
    """Identity and offers of this worker. Reads the credentials named in the settings; raises
    OSError and ssl.SSLError."""

    def __init__(
        self,
        settings: ConnectorConfig,
        instance_id: str,
        compatibility: str,
        transports: Mapping[str, Transport],
        local: LocalKv,
    ) -> None:
        self._settings = settings
        self._instance_id = instance_id
        self._compatibility = compatibility
        self._transports = transports
        self._local = local
        self._auth = LinkAuth(settings)

    def dial(self, link: Link, address: str, instance_id: str) -> None:
        """Connect to a producer. Sets `link.consumer`, and `link.downgrade` if a better transport
        was unavailable. Raises OSError and KvTransferError."""
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), DEAD_PEER_S)
        except (ValueError, OverflowError) as error:
            raise KvTransferError(f"invalid KV address {address!r}") from error
        self._secure(link, sock, is_server=False)
        nonce = self._auth.nonce()
        link.stream.send_handshake(
            Hello(
                PROTOCOL_VERSION,
                self._instance_id,
                instance_id,
                self._compatibility,
                list(self._transports),
                nonce,
                self._settings.tls,
            )
        )
        answer = link.stream.read()
        if isinstance(answer, RefuseHandshake):
            raise HandshakeRefused(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError("expected Welcome")
        signed = (nonce, answer.nonce, self._instance_id.encode(), instance_id.encode())
        self._auth.check(answer.proof, "producer", *signed)
        if answer.instance_id != instance_id:
            raise HandshakeRefused("the producer has been restarted")
        link.peer_instance_id = instance_id
        name, channel, details = self._choose(link, answer)
        link.stream.send_handshake(Select(name, details, self._auth.prove("consumer", *signed)))
        self._end(link)
        link.consumer = channel
        if link.downgrade:
            own, peer = self._instance_id, link.peer
            logger.warning("worker %s gets KV from %s over %s", own, peer, link.downgrade)

    def _choose(self, link: Link, welcome: Welcome) -> tuple[str, ConsumerChannel, dict[str, Any]]:
        """Open the consumer's end of the first offer that works here. Return (name, end, details
        for the producer)."""
        is_one_host = welcome.boot_id == boot_id()
        offers = {offer["transport"]: offer for offer in welcome.offers}
        unusable: list[str] = []
        downgrade: list[str] = []
        for name in self._settings.names(on_gpu=not self._local.is_host):
            try:
                channel, details = self._open(name, offers.get(name), link, is_one_host)
            except TransportUnavailable as error:
                unusable.append(f"{name}: {error}")
                # Between hosts, `auto` never uses a local transport, so this is not a downgrade.
                is_auto = self._settings.transports == (AUTO,)
                if is_one_host or not (is_auto and name in LOCAL):
                    downgrade.append(unusable[-1])
                continue
            if downgrade:
                link.downgrade = f"{name}; not {'; not '.join(downgrade)}"
            return name, channel, details
        raise _refused(link, "no common transport: " + "; ".join(unusable))

    def _open(
        self, name: str, offer: dict[str, Any] | None, link: Link, is_one_host: bool
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        """Open the consumer's end of a transport. Raises TransportUnavailable."""
        transport = self._transports.get(name)
        if name in LOCAL and not is_one_host:
            raise TransportUnavailable("the workers run on different hosts")
        if transport is None:
            raise TransportUnavailable("this worker cannot use it")
        if offer is None:
            raise TransportUnavailable("the producer does not offer it")
        return transport.consumer(self._local, offer, link)

    def accept(self, link: Link, sock: socket.socket, refusal: str) -> None:
        """Answer a consumer that connected. Sets `link.producer`. `refusal`: why consumers are
        refused now, or "". Raises OSError and KvTransferError."""
        self._secure(link, sock, is_server=True)
        hello = link.stream.read()
        if not isinstance(hello, Hello):
            raise ProtocolError("expected Hello")
        if reason := self._refusal_of(hello) or refusal:
            raise _refused(link, reason)
        nonce = self._auth.nonce()
        signed = (hello.nonce, nonce, hello.instance_id.encode(), self._instance_id.encode())
        offers = [
            {"transport": name, **offer}
            for name in hello.transports
            if name in self._transports
            and (offer := self._transports[name].offer(self._local)) is not None
        ]
        proof = self._auth.prove("producer", *signed)
        link.stream.send_handshake(Welcome(self._instance_id, boot_id(), offers, nonce, proof))
        answer = link.stream.read()
        if isinstance(answer, RefuseHandshake):
            raise HandshakeRefused(answer.reason)
        if not isinstance(answer, Select) or answer.transport not in self._transports:
            raise ProtocolError("expected Select")
        self._auth.check(answer.proof, "consumer", *signed)
        link.peer_instance_id = hello.instance_id
        self._end(link)
        transport = self._transports[answer.transport]
        link.producer = transport.producer(self._local, answer.details, link)

    def _refusal_of(self, hello: Hello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return f"protocol version {hello.version}, not {PROTOCOL_VERSION}"
        if hello.producer_instance_id != self._instance_id:
            return "the producer has been restarted"
        if hello.tls != self._settings.tls:
            ours, theirs = (str(x).lower() for x in (self._settings.tls, hello.tls))
            return f"worker.kv.tls is {ours} at the producer and {theirs} at the consumer"
        if hello.compatibility != self._compatibility:
            return f"KV layout {hello.compatibility}, not {self._compatibility}"
        return ""

    def _secure(self, link: Link, sock: socket.socket, *, is_server: bool) -> None:
        link.open(sock, self._settings.send_timeout_s)
        sock.settimeout(self._settings.handshake_timeout_s)
        if is_server and self._auth.lacks_tls(sock):
            # A socket that is closed with bytes unread would not deliver the reason.
            link.stream.read()
            reason = "the producer requires TLS, and this worker has no worker.access.tls"
            raise _refused(link, reason)
        if (tls := self._auth.secure(sock, is_server=is_server)) is not None:
            link.stream.begin_tls(tls)

    def _end(self, link: Link) -> None:
        settings = self._settings
        link.stream.end_handshake(settings.handshake_timeout_s, keeps_tls=settings.tls)


def _refused(link: Link, reason: str) -> HandshakeRefused:
    """Send the peer the reason of a refusal, and return the refusal."""
    link.stream.send_handshake(RefuseHandshake(reason))
    return HandshakeRefused(reason)
