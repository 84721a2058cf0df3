"""A worker's links to its peers, and the two tables of transfers that move over them.

The tables (source.py, target.py) decide; `Links` owns the listener and the links, has that done
(pushing.py), and tells them what peers said. Threads: one accepting, two a link, and
vLLM's own, which comes in through worker.py. One lock is held around the tables and the state here.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kv_transfer import source_actions as src
from kv_transfer import target as tgt
from kv_transfer.counters import TransferCounters
from kv_transfer.deciding import Deciding
from kv_transfer.digest import NO_DIGEST, Sampler
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.link import Link, LinkTimeouts
from kv_transfer.listener import Listener
from kv_transfer.messages import (
    Ack,
    Again,
    Alive,
    Cancel,
    Chunk,
    Done,
    Fail,
    Grant,
    Message,
)
from kv_transfer.pushing import Pushing
from kv_transfer.snapshot import KvSnapshot, account_of, link_views, totals_of, transfer_views
from kv_transfer.source import SourceTable

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Iterable, Sequence

    from kv_transfer.handshake import Identity
    from kv_transfer.layout import PagePart
    from kv_transfer.protocol.plan import Shard
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport

logger = logging.getLogger(__name__)

# Connections that have not completed the handshake: each has a thread.
MAX_STRANGERS = 256

# How long a copy may take to end when its link has been closed: it is bound by memory then.
COPY_END_S = 30.0
_FROM_TARGET = (Grant, Again, Cancel, Ack)
_FROM_SOURCE = (Chunk, Done, Fail, Alive)


class Links:
    """See the top of the file. `close` releases everything."""

    def __init__(
        self, settings: KvSettings, instance_id: str, transports: Sequence[Transport]
    ) -> None:
        self._settings = settings
        self._transports = transports
        self._local: LocalKv | None = None
        self._identity: Identity | None = None
        self.lock = Deciding()
        self.copies = threading.Condition(self.lock.inner)
        self._outgoing: dict[tuple[str, str], Link] = {}
        self._all: set[Link] = set()
        self._fencing: set[Link] = set()
        self._slots = itertools.count(1)
        self._sources: SourceTable[Link] | None = None
        self.targets: tgt.TargetTable[Link] = tgt.TargetTable(
            settings.receive_timeout_s, settings.cancel_timeout_s
        )
        self._released: set[str] = set()
        self.counters = TransferCounters()
        self._pushing = Pushing(self, Sampler(settings.digest))
        self._listener = Listener(settings.host)
        self._closing = False

    @property
    def address(self) -> str:
        """host:port that a target dials."""
        return self._listener.address

    @property
    def sources(self) -> SourceTable[Link]:
        """Raises KvTransferError before `register`."""
        if self._sources is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._sources

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any transfer."""
        return not (len(self.sources) or len(self.targets) or self._fencing)

    def register(self, local: LocalKv, identity: Identity, shard: Shard) -> None:
        """The KV cache exists: take connections from now on."""
        self._local, self._identity = local, identity
        chunk_blocks = self._settings.chunk_bytes // local.region.geometry.block_bytes
        self._sources = SourceTable(
            shard=shard,
            chunk_blocks=chunk_blocks,
            lease_s=self._settings.lease_s,
            grant_wait_s=self._settings.lease_s,
            alive_s=self._settings.receive_timeout_s / 4,
            by_token=local.region.block_size > 0,
        )
        self._listener.start(self._serve, self._tick_idle)

    def close(self) -> None:
        """Ends every link and the listener. The KV cache itself is vLLM's."""
        self._listener.close()
        with self.lock:
            self._closing = True
            links = list(self._all)
        for link in links:
            link.close("the worker stops")
        end = time.monotonic() + COPY_END_S
        for link in links:
            link.join(max(0.0, end - time.monotonic()))
            if not link.is_over:
                logger.error("the KV link to %s did not end", link.peer_address)

    # -- for the step, which holds `lock` around these

    def start(
        self,
        request_id: str,
        grants: Sequence[tuple[Link, Grant, PagePart | None]],
        now: float,
    ) -> None:
        """Grants the blocks of one request to the ranks of its source, over a link each."""
        self.do_target(self.targets.start(request_id, grants, now))
        for link, _, _ in grants:
            if link.is_down:
                self._fence(link, link.reason)

    def link_to(self, address: str, instance_id: str) -> Link:
        """The link to the source at `address`; dials where there is none."""
        link = self._outgoing.get((address, instance_id))
        if link is None or link.is_down:
            _, identity = self._registered()
            link = self._new_link()
            self._outgoing[address, instance_id] = link
            link.dial(address, identity, instance_id, next(self._slots))
        return link

    def wait_for_copies(self, transfer_ids: Sequence[str]) -> None:
        """Returns when no copy reads these transfers' blocks; raises KvTransferError where one does
        not end even with its link."""

        def running() -> list[Link]:
            return [link for t in transfer_ids for link in self.sources.copying_over(t)]

        if self.copies.wait_for(lambda: not running(), self._settings.preempt_timeout_s):
            return
        for link in running():
            link.close("the engine wants the blocks back")
        if not self.copies.wait_for(lambda: not running(), COPY_END_S):
            raise KvTransferError(f"a copy of preempted blocks did not end in {COPY_END_S} s")

    def tick(self, now: float) -> None:
        """What the passing of time decides."""
        self.do_source(self.sources.tick(now))
        self.do_target(self.targets.tick(now))
        for link in list(self._fencing):
            if link.target is None or link.target.idle():
                self.targets.fenced(link)
            if not self.targets.uses(link):
                self._fencing.discard(link)

    def snapshot(self) -> KvSnapshot:
        """Everything at this moment; takes the lock itself, from any thread."""
        now = time.monotonic()
        local, _ = self._registered()
        geometry = local.region.geometry
        account = account_of(self._transports)
        with self.lock:
            return KvSnapshot(
                taken_at=now,
                transfers=tuple(transfer_views(self.sources, self.targets, geometry, now)),
                links=tuple(link_views(self._all, now)),
                quarantined_slots=len(self._fencing) + sum(t.lost_slots for t in self._transports),
                held_bytes=account.held_bytes,
                totals=totals_of(self.counters, self.sources, self.targets, account),
            )

    def take_released(self) -> set[str]:
        """Requests whose blocks the engine may free, each once."""
        released, self._released = self._released, set()
        return released

    # -- from the links and the listener

    def on_up(self, link: Link) -> None:
        """On the link's reader thread."""
        with self.lock:
            self.counters.downgrades += len(link.downgrades)

    def on_message(self, link: Link, message: Message) -> None:
        """On a link's reader thread."""
        now = time.monotonic()
        if not isinstance(message, _FROM_TARGET if link.target is None else _FROM_SOURCE):
            raise ProtocolError(f"a {message.kind} message has no place here")
        if isinstance(message, Chunk):
            self._take_chunk(link, message)
            return
        with self.lock:
            if link.is_down:  # on_down has spoken, or will: nothing may be bound to the link now
                return
            if link.target is None:
                self._from_target(link, message, now)
            else:
                self._from_source(link, message, now)

    def _from_target(self, link: Link, message: Message, now: float) -> None:
        match message:
            case Grant():
                self._granted(link, message, now)
                return
            case Cancel(transfer_id):
                self.do_source(self.sources.cancel(link, transfer_id))
            case Again(transfer_id, first):
                self.do_source(self.sources.again(link, transfer_id, first, now))
            case Ack(transfer_id):
                self.do_source(self.sources.ack(link, transfer_id))
        self.lock.wakes()

    def _from_source(self, link: Link, message: Message, now: float) -> None:
        match message:
            case Done():
                self.do_target(self.targets.done(link, message, link.transport))
            case Fail(transfer_id, reason):
                self.targets.fail(link, transfer_id, reason)
            case Alive(transfer_ids):
                self.targets.alive(link, transfer_ids, now)
        self.lock.wakes()

    def _granted(self, link: Link, grant: Grant, now: float) -> None:
        actions = self.sources.grant(link, grant, now)
        self.counters.refused_grants += any(type(a) is src.SendFail for a in actions)
        self.do_source(actions)
        if self._released:
            self.lock.wakes()

    def on_down(self, link: Link, reason: str) -> None:
        """On whichever thread found out."""
        with self.lock:
            self.counters.dropped_links += link.was_dropped
            for key in [k for k, v in self._outgoing.items() if v is link]:
                del self._outgoing[key]
            if self._sources is not None:
                self.do_source(self._sources.link_down(link))
            if self.targets.uses(link):
                self._fence(link, reason)
            self.lock.wakes()
        if not self._closing:
            logger.info("KV link down: %s", reason)

    def _fence(self, link: Link, reason: str) -> None:
        self.targets.link_down(link, reason)
        self._fencing.add(link)

    def _take_chunk(self, link: Link, chunk: Chunk) -> None:
        channel, (local, _) = link.target, self._registered()
        if channel is None:
            raise ProtocolError("a chunk came to a source")
        chunk.check_layers(local.region.geometry.num_layers)
        with self.lock:
            place = self.targets.begin_chunk(link, chunk)
        if place is None:
            channel.receive(chunk, None)
            return
        try:
            region = local.region
            if place.part is not None:
                region = region.narrowed(place.part.target_start, place.part.size)
            chunk.check_size(region.size_bytes(chunk.count, chunk.tokens))
            channel.receive(chunk, place.block_ids, place.part)
        except BaseException:
            with self.lock:
                self.targets.abort_chunk(link, chunk)
            raise
        received = time.monotonic()
        mark, span = chunk.digest, chunk.span()
        intact = mark == NO_DIGEST or mark == region.digest(place.block_ids, span)
        now = time.monotonic()
        with self.lock:
            self.counters.digest_s += now - received
            self.counters.digest_mismatches += not intact
            self.do_target(self.targets.end_chunk(link, chunk, now, intact=intact))
            if not intact:
                self.lock.wakes()
        if not intact:
            logger.warning(
                "transfer %s: blocks %d+%d came damaged from worker %r over %s",
                chunk.transfer_id,
                chunk.first,
                chunk.count,
                link.peer_instance_id,
                link.transport,
            )

    def _tick_idle(self) -> None:
        """On the accepting thread: an idle engine runs no step, and grants still run out."""
        with self.lock:
            self.do_source(self.sources.tick(time.monotonic()))

    def _serve(self, sock: socket.socket) -> None:
        """On the accepting thread."""
        _, identity = self._registered()
        with self.lock:
            if self._closing:
                sock.close()
            else:
                keep_few(self._all)
                self._new_link().serve(sock, identity)

    def _new_link(self) -> Link:
        # A link that is down stays here until its threads are over: `close` waits for them.
        self._all = {link for link in self._all if not link.is_over}
        local, _ = self._registered()
        timeouts = LinkTimeouts(self._settings.handshake_timeout_s, self._settings.send_timeout_s)
        link = Link(self, local, self._transports, timeouts)
        self._all.add(link)
        return link

    # -- doing what the tables decided

    def do_source(self, actions: Iterable[src.SourceAction[Link]]) -> None:
        """What the table of sources decided."""
        for action in actions:
            match action:
                case src.PushChunk():
                    region = self._registered()[0].region
                    size = region.size_bytes(len(action.source_ids), action.tokens)
                    work = partial(self._pushing.push, region, action)
                    self.lock.queued(action.link).run(work, size)
                case src.SendDone():
                    self.lock.queued(action.link).run(partial(self._pushing.send_done, action))
                case src.SendFail(link, transfer_id, reason):
                    self.lock.queued(link).send_next(Fail(transfer_id, reason))
                case src.SendAlive(link, transfer_id):
                    self.lock.queued(link).send_next(Alive([transfer_id]))
                case src.Release(request_id):
                    self._released.add(request_id)

    def do_target(self, actions: Iterable[tgt.TargetAction[Link]]) -> None:
        """What the table of targets decided."""
        for action in actions:
            match action:
                case tgt.SendGrant(link, grant):
                    self.lock.queued(link).send(grant)
                case tgt.SendAgain(link, transfer_id, first):
                    self.lock.queued(link).send(Again(transfer_id, first))
                case tgt.SendCancel(link, transfer_id):
                    self.lock.queued(link).send(Cancel(transfer_id))
                case tgt.SendAck(link, transfer_id):
                    self.lock.queued(link).send(Ack(transfer_id))
                case tgt.DropLink(link):
                    link.close("the source did not answer in time")

    def _registered(self) -> tuple[LocalKv, Identity]:
        if self._local is None or self._identity is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._local, self._identity


def keep_few(links: Collection[Link]) -> None:
    """Close the oldest link without a handshake if there are MAX_STRANGERS of them."""
    strangers = [link for link in links if link.is_stranger]
    if len(strangers) >= MAX_STRANGERS:
        min(strangers, key=lambda link: link.opened_at).close("too many unfinished handshakes")
