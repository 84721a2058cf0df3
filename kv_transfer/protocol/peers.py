"""A worker's links to its peers, and the transfers that move over them.

`Producer` and `Consumer` decide; `Peers` connects, runs two threads per link (a reader and a
writer), and passes on what peers say. One lock guards both state machines. Nothing is sent while it
is held: actions are queued on their links.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kv_transfer.errors import HandshakeRefused, KvTransferError, ProtocolError
from kv_transfer.memory import boot_id
from kv_transfer.protocol.auth import LinkAuth
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.link import DEAD_PEER_S, Link
from kv_transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    ChunkReady,
    Done,
    Fail,
    Heartbeat,
    Hello,
    Inner,
    Message,
    Nack,
    Refusal,
    Select,
    Send,
    Subscribe,
    Welcome,
)
from kv_transfer.protocol.producer import Producer, Release, SendChunk
from kv_transfer.settings import AUTO, LOCAL
from kv_transfer.transport.base import TransportUnavailable, source_of, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kv_transfer.layout import PagePart
    from kv_transfer.protocol.link import ConsumerChannel
    from kv_transfer.protocol.plan import Plan
    from kv_transfer.protocol.producer import Action
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport

logger = logging.getLogger(__name__)

# A copy on a closed link is bounded by memory bandwidth.
COPY_END_S = 30.0
# Connections without a completed handshake; each has a thread.
MAX_STRANGERS = 256
_TICK_S = 0.5


@dataclass(slots=True)
class TransferCounters:
    """Totals since the worker started."""

    pushed_bytes: int = 0
    pushed_blocks: int = 0
    push_s: float = 0.0
    received_bytes: int = 0
    digest_s: float = 0.0  # spent by the producer on digests
    failures: int = 0
    downgrades: int = 0  # links to producers that use a slower transport, see Link.downgrade
    dropped_links: int = 0  # connections without a valid handshake, or that broke the protocol


class Peers:
    """Listens as soon as it is made; accepts links after `register`. Released by `close`."""

    def __init__(
        self, settings: KvSettings, instance_id: str, transports: Sequence[Transport]
    ) -> None:
        self.transports = {transport.name: transport for transport in transports}
        self.lock = threading.RLock()
        self.counters = TransferCounters()
        self.links: set[Link] = set()
        # Called on any thread when the engine should look for results.
        self.wake: Callable[[], None] = lambda: None
        self.consumer: Consumer[Link] = Consumer(settings.receive_timeout_s)
        self._producer: Producer[Link] | None = None
        self._settings = settings
        self._instance_id = instance_id
        self._auth = LinkAuth(settings)
        self._local: LocalKv | None = None
        self._compatibility = ""
        self._outgoing: dict[tuple[str, str], Link] = {}
        self._released: set[str] = set()
        self._copies = threading.Condition(self.lock)
        self._queued: set[Link] = set()  # has been queued to since the last flush
        self._undigested: SimpleQueue[str | None] = SimpleQueue()
        self._is_closing = False
        self._listener = socket.create_server((settings.host, 0), backlog=64)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name="kv-accept")
        self._digester = threading.Thread(target=self._digest, daemon=True, name="kv-digest")

    @property
    def producer(self) -> Producer[Link]:
        if self._producer is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._producer

    @property
    def local(self) -> LocalKv:
        if self._local is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._local

    @property
    def is_empty(self) -> bool:
        """Whether no transfer is known."""
        return not (len(self.producer) or len(self.consumer))

    def register(self, local: LocalKv, compatibility: str, plan: Plan) -> None:
        """Accept links for this KV cache."""
        self._local, self._compatibility = local, compatibility
        self._producer = Producer(
            plan=plan,
            chunk_blocks=[
                max(1, self._settings.chunk_bytes // region.geometry.block_bytes)
                for region in local.regions
            ],
            lease_s=self._settings.lease_s,
            heartbeat_s=self._settings.receive_timeout_s / 4,
        )
        if (zeroed := local.regions[0].step_end()) is not None:
            # vLLM has just enqueued zeros for the whole cache. What is copied below before they are
            # there is what the memory held, which may be NaN, and comes back after them.
            zeroed.synchronize()
        for region, blocks in zip(local.regions, self.producer.chunk_blocks, strict=True):
            # The first use of a kernel loads its code, which may wait for the whole GPU.
            for count in () if region.is_host else (1, blocks):
                ids = list(range(min(count, region.geometry.num_blocks)))
                region.copy_from(region, ids, ids)
        self._listener.settimeout(_TICK_S)
        self._acceptor.start()
        self._digester.start()

    def close(self) -> None:
        """End every link and the listener. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close does not
        self._undigested.put(None)
        for thread in (self._acceptor, self._digester):
            if thread.ident is not None:
                thread.join(COPY_END_S)
        self._listener.close()
        with self.lock:
            links = list(self.links)
        for link in links:
            self._drop(link, "the worker stops")
        end = time.monotonic() + COPY_END_S
        for link in links:
            if link.thread is not None and link.thread is not threading.current_thread():
                link.thread.join(max(0.0, end - time.monotonic()))
            if not link.is_over:
                logger.error("the KV link to %s did not end", link.peer)

    # -- for the engine's step

    def perform(self, actions: Iterable[Action[Link]]) -> None:
        """Queue what a state machine decided. The caller holds `lock`, and then calls `flush`."""
        for action in actions:
            if isinstance(action, Release):
                self._released.add(action.request_id)
            else:
                action.link.queue(action.message if isinstance(action, Send) else action)
                self._queued.add(action.link)

    def flush(self) -> None:
        """Send what `perform` queued as far as that needs no waiting; leave the rest to the writer
        threads. Waking a thread takes longer than sending a message."""
        self._wake_if_due()
        with self.lock:
            links, self._queued = self._queued, set()
        for link in links:
            if link.transport and link.writing.acquire(blocking=False):
                try:
                    self._write_queued(link, may_wait=False)
                except (OSError, KvTransferError) as error:
                    self._broken(link, error)
                finally:
                    link.writing.release()
            link.wake_writer()
        self._wake_if_due()

    def link_to(self, address: str, instance_id: str) -> Link:
        """Return the link to a producer, dialling if there is none. The caller holds `lock`."""
        link = self._outgoing.get((address, instance_id))
        if link is None or link.is_down:
            link = self._outgoing[address, instance_id] = Link(address, is_dialled=True)
            self._start(link, lambda: self._dial(link, address, instance_id))
        return link

    def subscribe(
        self,
        request_id: str,
        subscriptions: Sequence[tuple[Link, Subscribe, Sequence[PagePart]]],
        now: float,
    ) -> None:
        """Start a transfer. The caller holds `lock`."""
        self.perform(self.consumer.subscribe(request_id, subscriptions, now))
        for link, _, _ in subscriptions:
            if link.is_down:
                self.perform(self.consumer.link_down(link, link.reason))

    def wait_for_copies(self, transfer_ids: Sequence[str]) -> None:
        """Return when no copy reads these transfers' blocks. The caller holds `lock`.

        After `preempt_timeout_s` the links of such copies are closed. Raises KvTransferError if a
        copy does not end even then.
        """

        def running() -> list[Link]:
            return [link for name in transfer_ids for link in self.producer.copying(name)]

        if self._copies.wait_for(lambda: not running(), self._settings.preempt_timeout_s):
            return
        for link in running():
            self._drop(link, "the engine needs the blocks")
        if not self._copies.wait_for(lambda: not running(), COPY_END_S):
            raise KvTransferError(f"a copy of preempted blocks did not end in {COPY_END_S:g} s")

    def progress(self, transfer_id: str, tables: Sequence[list[int]], ready_tokens: int) -> None:
        """See Producer.progress. The caller holds `lock`."""
        now = time.monotonic()
        self.perform(self.producer.progress(transfer_id, tables, ready_tokens, now))
        self._undigested.put(transfer_id)

    def end(
        self, transfer_id: str, token_ids: tuple[int, ...], *, held: bool, request_id: str
    ) -> None:
        """See Producer.end. The caller holds `lock`."""
        now = time.monotonic()
        self.perform(
            self.producer.end(transfer_id, token_ids, now, held=held, request_id=request_id)
        )
        self._undigested.put(transfer_id)

    def tick(self) -> None:
        """Apply timeouts. The caller holds `lock`."""
        now = time.monotonic()
        self.perform(self.producer.tick(now))
        self.perform(self.consumer.tick(now))

    def take_released(self) -> set[str]:
        """Return requests whose blocks the engine may free, each once."""
        released, self._released = self._released, set()
        return released

    # -- threads of a link

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                with self.lock:  # an idle engine runs no step, and leases still end
                    self.perform(self.producer.tick(time.monotonic()))
                self.flush()
                continue
            except OSError as error:
                if not self._is_closing:  # out of descriptors, or the peer went away
                    logger.warning("cannot accept a KV link: %s", error)
                    time.sleep(0.1)
                continue
            link = Link("{}:{}".format(*address[:2]), is_dialled=False)
            with self.lock:
                strangers = [x for x in self.links if not (x.is_dialled or x.producer or x.is_down)]
                if len(strangers) >= MAX_STRANGERS:
                    oldest = min(strangers, key=lambda x: x.opened_at)
                    self._drop(oldest, "too many unfinished handshakes")
                try:
                    self._start(link, lambda link=link, sock=sock: self._serve(link, sock))  # type: ignore[misc]
                except RuntimeError as error:  # no more threads
                    sock.close()
                    logger.warning("cannot serve a KV link: %s", error)

    def _start(self, link: Link, handshake: Callable[[], None]) -> None:
        self.links = {each for each in self.links if not each.is_over}
        link.handshake_end = time.monotonic() + self._settings.handshake_timeout_s
        link.thread = threading.Thread(
            target=self._run, args=[link, handshake], daemon=True, name="kv-link"
        )
        link.thread.start()
        self.links.add(link)

    def _run(self, link: Link, handshake: Callable[[], None]) -> None:
        """Reader thread: handshake, then read until the link is down."""
        writer = threading.Thread(target=self._write, args=[link], daemon=True, name="kv-write")
        try:
            self.local.regions[0].enter_thread()
            handshake()
            link.end_handshake()
            writer.start()
            while not link.is_down:
                self._receive(link, link.read())
        except Exception as error:  # noqa: BLE001 - top of the thread: it ends the link
            self._broken(link, error)
        finally:
            self._drop(link, "closed")
            if writer.ident is not None:
                writer.join()
            link.release()
            link.is_over = True

    def _write(self, link: Link) -> None:
        """Writer thread: send what is queued and could not be sent at once."""
        try:
            self.local.regions[0].enter_thread()
            if link.producer is not None:
                with link.writing:
                    link.producer.open()
            while link.wait_for_items():
                with link.writing:
                    self._write_queued(link, may_wait=True)
        except Exception as error:  # noqa: BLE001 - top of the thread: it ends the link
            self._broken(link, error)

    def _write_queued(self, link: Link, *, may_wait: bool) -> None:
        """Send what is queued, in order. The caller holds `link.writing`."""
        if may_wait:
            link.write_pieces([])
        while (item := link.take()) is not None:
            if isinstance(item, SendChunk):
                if not (may_wait or (link.producer is not None and link.producer.is_quick)):
                    link.put_back(item)
                    return
                self._send_chunk(link, item)
            elif may_wait:
                link.write(item)
            elif not link.write_some(item):
                return

    def _broken(self, link: Link, error: Exception) -> None:
        if not isinstance(error, OSError | KvTransferError):
            logger.error("KV link to %s failed", link.peer, exc_info=error)
        link.is_blamed |= isinstance(error, ProtocolError)
        self._drop(link, str(error) or type(error).__name__)

    def _drop(self, link: Link, reason: str) -> None:
        """Close a link and fail what depends on it. Idempotent."""
        if not link.close(reason):
            return
        with self.lock:
            is_stranger = not link.is_dialled and link.producer is None
            self.counters.dropped_links += is_stranger or (link.is_blamed and not link.is_dialled)
            for key in [key for key, value in self._outgoing.items() if value is link]:
                del self._outgoing[key]
            if self._producer is not None:
                self.perform(self._producer.link_down(link))
            self.perform(self.consumer.link_down(link, reason))
        if not self._is_closing:
            logger.info("KV link to %s closed: %s", link.peer, reason)
        self._wake_writers()

    def _wake_writers(self) -> None:
        """Have the writer threads send what was queued."""
        with self.lock:
            links, self._queued = self._queued, set()
        for link in links:
            link.wake_writer()
        self._wake_if_due()

    def _wake_if_due(self) -> None:
        if self._released or self.consumer.has_outcomes:
            self.wake()

    # -- handshake

    def _dial(self, link: Link, address: str, instance_id: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), DEAD_PEER_S)
        except (ValueError, OverflowError) as error:
            raise KvTransferError(f"invalid KV address {address!r}") from error
        link.open(sock, self._settings.send_timeout_s)
        sock.settimeout(self._settings.handshake_timeout_s)
        link.replace_socket(self._auth.secure(sock, is_server=False))
        nonce = self._auth.nonce()
        names = list(self.transports)
        link.say(
            Hello(
                PROTOCOL_VERSION,
                self._instance_id,
                instance_id,
                self._compatibility,
                names,
                nonce,
            )
        )
        answer = link.read()
        if isinstance(answer, Refusal):
            raise HandshakeRefused(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError("expected Welcome")
        signed = (nonce, answer.nonce, self._instance_id.encode(), instance_id.encode())
        self._auth.check(answer.proof, "producer", *signed)
        if answer.instance_id != instance_id:
            raise HandshakeRefused("the producer has been restarted")
        link.peer_instance_id = instance_id
        is_one_host = answer.boot_id == boot_id()
        offers = {offer["transport"]: offer for offer in answer.offers}
        unusable: list[str] = []
        downgrade: list[str] = []
        for name in self._settings.names(on_gpu=not self.local.is_host):
            try:
                channel, details = self._open(name, offers.get(name), link, is_one_host)
            except TransportUnavailable as error:
                unusable.append(f"{name}: {error}")
                # That `auto` takes another one between hosts is what it is for.
                is_auto = self._settings.transports == (AUTO,)
                if is_one_host or not (is_auto and name in LOCAL):
                    downgrade.append(unusable[-1])
                continue
            proof = self._auth.prove("consumer", *signed)
            link.say(Select(name, details, proof))
            link.replace_socket(self._auth.finish(link.sock))
            link.consumer = channel
            if downgrade:
                link.downgrade = f"{name}; not {'; not '.join(downgrade)}"
                self.counters.downgrades += 1
                own, peer = self._instance_id, link.peer
                logger.warning("worker %s gets KV from %s over %s", own, peer, link.downgrade)
            return
        reason = "no common transport: " + "; ".join(unusable)
        link.say(Refusal(reason))
        raise HandshakeRefused(reason)

    def _open(
        self, name: str, offer: dict[str, Any] | None, link: Link, is_one_host: bool
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        """Open the consumer's end of a transport, and return the details for the producer. Raises
        TransportUnavailable."""
        transport = self.transports.get(name)
        if name in LOCAL and not is_one_host:
            raise TransportUnavailable("the workers run on different hosts")
        if transport is None:
            raise TransportUnavailable("this worker cannot use it")
        if offer is None:
            raise TransportUnavailable("the producer does not offer it")
        return transport.consumer(self.local, offer, link)

    def _serve(self, link: Link, sock: socket.socket) -> None:
        link.open(sock, self._settings.send_timeout_s)
        sock.settimeout(self._settings.handshake_timeout_s)
        link.replace_socket(self._auth.secure(sock, is_server=True))
        hello = link.read()
        if not isinstance(hello, Hello):
            raise ProtocolError("expected Hello")
        try:
            self._check(hello)
        except HandshakeRefused as error:
            link.say(Refusal(str(error)))
            raise
        nonce = self._auth.nonce()
        signed = (hello.nonce, nonce, hello.instance_id.encode(), self._instance_id.encode())
        offers = [
            {"transport": name, **offer}
            for name in hello.transports
            if name in self.transports
            and (offer := self.transports[name].offer(self.local)) is not None
        ]
        proof = self._auth.prove("producer", *signed)
        link.say(Welcome(self._instance_id, boot_id(), offers, nonce, proof))
        answer = link.read()
        if isinstance(answer, Refusal):
            raise HandshakeRefused(answer.reason)
        if not isinstance(answer, Select) or answer.transport not in self.transports:
            raise ProtocolError("expected Select")
        self._auth.check(answer.proof, "consumer", *signed)
        link.peer_instance_id = hello.instance_id
        link.replace_socket(self._auth.finish(link.sock))
        transport = self.transports[answer.transport]
        link.producer = transport.producer(self.local, answer.details, link)

    def _check(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise HandshakeRefused(f"protocol version {hello.version}, not {PROTOCOL_VERSION}")
        if hello.producer_instance_id != self._instance_id:
            raise HandshakeRefused("the producer has been restarted")
        if hello.compatibility != self._compatibility:
            raise HandshakeRefused(f"KV layout {hello.compatibility}, not {self._compatibility}")

    # -- what a peer says

    def _receive(self, link: Link, message: Message) -> None:
        """Reader thread: handle one message."""
        if isinstance(message, ChunkReady):
            self._receive_chunk(link, message)
        elif isinstance(message, Inner):
            channel = link.consumer or link.producer
            assert channel is not None, "the handshake is over"
            channel.told(message.body)
            return
        else:
            with self.lock:
                if link.is_down:
                    return
                now = time.monotonic()
                if link.consumer is None:
                    self.perform(self._from_consumer(link, message, now))
                else:
                    self.perform(self._from_producer(link, link.consumer, message, now))
        self.flush()

    def _from_consumer(self, link: Link, message: Message, now: float) -> list[Action[Link]]:
        match message:
            case Subscribe(transfer_id):
                actions = self.producer.subscribe(link, message, now)
                self._undigested.put(transfer_id)
                return actions
            case Nack(transfer_id, first):
                return self.producer.nack(link, transfer_id, first, now)
            case Cancel(transfer_id):
                return self.producer.cancel(link, transfer_id)
            case Ack(transfer_id):
                return self.producer.ack(link, transfer_id)
        raise ProtocolError(f"unexpected {type(message).__name__} from a consumer")

    def _from_producer(
        self, link: Link, channel: ConsumerChannel, message: Message, now: float
    ) -> list[Send[Link]]:
        match message:
            case Done():
                return self.consumer.done(link, message, channel.name, is_pull=channel.is_pull)
            case Fail(transfer_id, reason):
                return self.consumer.fail(link, transfer_id, reason)
            case Heartbeat(transfer_id):
                self.consumer.heartbeat(link, transfer_id, now)
                return []
        raise ProtocolError(f"unexpected {type(message).__name__} from a producer")

    # -- chunks

    def _digest(self) -> None:
        """Make the digests of blocks that are computed, while they move."""
        self.local.regions[0].enter_thread()
        while (transfer_id := self._undigested.get()) is not None:
            while not self._is_closing:
                with self.lock:
                    found = self.producer.undigested(transfer_id)
                if found is None:
                    break
                begun = time.monotonic()
                digests = b""
                try:
                    digests = source_of(self.local.regions, found.part).digests(found.block_ids)
                except Exception:
                    logger.exception("cannot make the digests of transfer %s", transfer_id)
                now = time.monotonic()
                with self.lock:
                    self.counters.digest_s += now - begun
                    self.perform(self.producer.digested(found, digests, now))
                self.flush()

    def _send_chunk(self, link: Link, chunk: SendChunk[Link]) -> None:
        """Send a chunk, if it is still wanted."""
        channel = link.producer
        if channel is None:
            raise KvTransferError("this end of the link receives")
        with self.lock:
            if not self.producer.begin_copy(chunk):
                return
        sent_bytes = 0
        begun = time.monotonic()
        try:
            region = source_of(self.local.regions, chunk.part)
            size = region.size_bytes(len(chunk.block_ids))
            message = ChunkReady(chunk.transfer_id, chunk.first, len(chunk.block_ids), size)
            channel.send(message, chunk.block_ids, chunk.part)
            sent_bytes = size
        finally:
            now = time.monotonic()
            with self.lock:
                self.perform(self.producer.end_copy(chunk, now, now - begun, sent_bytes))
                self._copies.notify_all()
                if sent_bytes:
                    self.counters.pushed_bytes += sent_bytes
                    self.counters.pushed_blocks += len(chunk.block_ids)
                    self.counters.push_s += now - begun

    def _receive_chunk(self, link: Link, chunk: ChunkReady) -> None:
        """Reader thread: put a chunk in place."""
        channel = link.consumer
        if channel is None:
            raise ProtocolError("unexpected ChunkReady from a consumer")
        with self.lock:
            place = self.consumer.begin_chunk(link, chunk)
        if place is None:
            channel.receive(chunk, None, None)
            return
        begun = time.monotonic()
        try:
            region = target_of(self.local.regions, place.part)
            if chunk.size != region.size_bytes(chunk.count):
                raise ProtocolError(f"{chunk.count} blocks are not {chunk.size} bytes")
            digests = channel.receive(chunk, place.block_ids, place.part)
        except BaseException as error:
            with self.lock:
                self.perform(self.consumer.abort_chunk(link, chunk, str(error)))
            raise
        now = time.monotonic()
        with self.lock:
            self.perform(self.consumer.end_chunk(link, chunk, now, now - begun, digests))
