"""The connector's half in vLLM's worker process: owns the KV region, the listener and the links,
and drives the two state machines under one lock.

Threads: vLLM's own (the step), one accepting, two a link. The step never waits for a peer, except
for a copy that still reads blocks which the engine wants back (`preempt`), and that wait has a
bound: then the copy's link is closed, which ends the copy.
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
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.guard import Guard
from kv_transfer.link import Identity, Link, LinkTimeouts
from kv_transfer.listener import Listener
from kv_transfer.messages import (
    Ack,
    Alive,
    Cancel,
    Chunk,
    Done,
    Fail,
    Grant,
    Message,
)
from kv_transfer.source import SourceTable
from kv_transfer.step import Arrival, WorkerOutput

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Sequence

    from kv_transfer.settings import KvSettings
    from kv_transfer.step import StepMetadata
    from kv_transfer.transport.base import LocalKv, Transport

logger = logging.getLogger(__name__)

# How long a copy may take to end when its link has been closed: it is bound by memory then.
COPY_END_S = 30.0
JOIN_S = 2.0
_FROM_TARGET = (Grant, Cancel, Ack)
_FROM_SOURCE = (Chunk, Done, Fail, Alive)


def _nobody_waits() -> None:
    """Whoever drives the step looks often enough by itself."""


class WorkerHalf:
    """See the top of the file. `close` releases everything."""

    def __init__(self, settings: KvSettings, epoch: str, transports: Sequence[Transport]) -> None:
        self._settings = settings
        self._epoch = epoch
        self._transports = transports
        self._local: LocalKv | None = None
        self._identity: Identity | None = None
        self._lock = threading.RLock()
        self._copies = threading.Condition(self._lock)
        self._outgoing: dict[tuple[str, str], Link] = {}
        self._links: set[Link] = set()
        self._fencing: set[Link] = set()
        self._slots = itertools.count(1)
        self._sources: SourceTable[Link] | None = None
        self._targets: tgt.TargetTable[Link] = tgt.TargetTable(
            settings.receive_timeout_s, settings.cancel_timeout_s
        )
        self._sent: set[str] = set()
        self._output = WorkerOutput()
        self._wake: Callable[[], None] = _nobody_waits
        self.resumed: dict[str, list[int]] = {}
        self.counters = TransferCounters()
        self._guard = Guard(settings, epoch, self.counters)
        self._listener = Listener(settings.host)
        self._closing = False

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when the next step may find that a transfer moved on."""
        self._wake = wake

    @property
    def address(self) -> str:
        """host:port that a target dials."""
        return self._listener.address

    def register(self, local: LocalKv, identity: Identity, block_size: int) -> None:
        """The KV cache exists: take connections from now on."""
        self._local, self._identity = local, identity
        chunk_blocks = self._settings.chunk_bytes // local.region.geometry.block_bytes
        self._sources = SourceTable(
            block_size=block_size,
            chunk_blocks=chunk_blocks,
            lease_s=self._settings.lease_s,
            grant_wait_s=self._settings.lease_s,
            alive_s=self._settings.receive_timeout_s / 4,
        )
        self._listener.start(self._serve, self._tick_idle)

    # -- the step

    def before_step(self, metadata: StepMetadata) -> None:
        """Start of a step, before anything is computed: control traffic must not wait for the
        forward pass, and blocks that were taken away must not be read any more."""
        now = time.monotonic()
        # Read in this very step, by runner V1 alone: what is left over is nobody's.
        self.resumed.clear()
        self.resumed.update(metadata.resumed)
        with self._lock:
            sources = self._known_sources()
            for expected in metadata.expected:
                self._do_source(sources.expect(expected.transfer_id, expected.request_id, now))
            for transfer_id in metadata.preempted:
                sources.preempt(transfer_id)
            for ended in metadata.ended:
                self._do_source(
                    sources.end(
                        ended.transfer_id,
                        ended.token_ids,
                        now,
                        held=ended.held,
                        request_id=ended.request_id,
                    )
                )
            for s in metadata.starts:
                grant = Grant(s.transfer_id, s.first_block, s.num_tokens, s.block_ids, s.capability)
                link = self._link_to(s.source_address, s.source_epoch)
                self._do_target(self._targets.start(link, s.request_id, grant, now))
                if link.is_down:
                    self._targets.link_down(link, link.reason)
                    self._fencing.add(link)
            for transfer_id in metadata.released:
                self._do_source(sources.release(transfer_id))
            for transfer_id in metadata.cancels:
                self._do_target(self._targets.cancel(transfer_id, "cancelled", now))
            for unneeded in metadata.unneeded:
                link = self._link_to(unneeded.source_address, unneeded.source_epoch)
                link.send(Cancel(unneeded.transfer_id, unneeded.capability))
            self._wait_for_copies(metadata.preempted)

    def after_step(self, metadata: StepMetadata) -> None:
        """The step has run: what it filled can be pushed."""
        now = time.monotonic()
        with self._lock:
            sources = self._known_sources()
            for p in metadata.progress:
                self._do_source(sources.progress(p.transfer_id, p.block_ids, p.ready_tokens, now))

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """(requests whose blocks may be freed, requests whose load ended, those of them that
        failed)."""
        now = time.monotonic()
        with self._lock:
            self._do_source(self._known_sources().tick(now))
            self._do_target(self._targets.tick(now))
            self._check_fences()
            received: set[str] = set()
            failed: set[str] = set()
            for outcome in self._targets.take_outcomes():
                received.add(outcome.request_id)
                if isinstance(outcome, tgt.Failed):
                    failed.add(outcome.request_id)
                    self.counters.failures += 1
                    self._output.failures[outcome.request_id] = outcome.reason
                else:
                    self.counters.received_bytes += outcome.report.bytes
                    self._output.arrivals[outcome.request_id] = Arrival(
                        outcome.request_id, outcome.token_ids, outcome.report
                    )
            sent, self._sent = self._sent, set()
        return sent, received, failed

    def take_output(self) -> WorkerOutput | None:
        """Arrivals and failures that `take_results` has reported, once."""
        with self._lock:
            output, self._output = self._output, WorkerOutput()
        return output if output.arrivals or output.failures else None

    def close(self) -> None:
        """Ends every link and the listener. The KV cache itself is vLLM's."""
        self._listener.close()
        with self._lock:
            self._closing = True
            links = list(self._links)
        for link in links:
            link.close("the worker stops")
        for link in links:
            link.join(JOIN_S)

    # -- links

    def on_up(self, link: Link) -> None:
        """On the link's reader thread."""
        with self._lock:
            self.counters.downgrades += len(link.downgrades)

    def on_message(self, link: Link, message: Message) -> None:
        """On a link's reader thread."""
        now = time.monotonic()
        if not isinstance(message, _FROM_TARGET if link.target is None else _FROM_SOURCE):
            raise ProtocolError(f"a {message.kind} message has no place here")
        if isinstance(message, Chunk):
            self._take_chunk(link, message)
            return
        with self._lock:
            if link.is_down:  # on_down has spoken, or will: nothing may be bound to the link now
                return
            match message:
                case Grant() | Cancel() if fail := self._refusal(link, message):
                    link.send_next(fail)
                case Grant():
                    actions = self._known_sources().grant(link, message, now)
                    self.counters.refused_grants += any(type(a) is src.SendFail for a in actions)
                    self._do_source(actions)
                case Cancel(transfer_id):
                    self._do_source(self._known_sources().cancel(link, transfer_id))
                case Ack(transfer_id):
                    self._do_source(self._known_sources().ack(link, transfer_id))
                case Done():
                    self._do_target(self._targets.done(link, message, link.transport))
                case Fail(transfer_id, reason):
                    self._targets.fail(link, transfer_id, reason)
                case Alive(transfer_ids):
                    self._targets.alive(link, transfer_ids, now)
        self._wake()

    def _refusal(self, link: Link, message: Grant | Cancel) -> Fail | None:
        # What the link was given it may always give back: its target waits for that.
        is_own = self._known_sources().granted_over(link, message.transfer_id)
        may_cancel = isinstance(message, Cancel) and is_own
        return None if may_cancel else self._guard.refusal(link, message)

    def on_down(self, link: Link, reason: str) -> None:
        """On whichever thread found out."""
        with self._lock:
            for key in [k for k, v in self._outgoing.items() if v is link]:
                del self._outgoing[key]
            if self._sources is not None:
                self._do_source(self._sources.link_down(link))
            if self._targets.uses(link):
                self._targets.link_down(link, reason)
                self._fencing.add(link)
        self._wake()
        if not self._closing:
            logger.info("KV link down: %s", reason)

    def _take_chunk(self, link: Link, chunk: Chunk) -> None:
        channel, (local, _) = link.target, self._registered()
        if channel is None:
            raise ProtocolError("a chunk came to a source")
        if chunk.bytes != chunk.count * local.region.geometry.block_bytes:
            raise ProtocolError(f"{chunk.count} blocks are not {chunk.bytes} bytes long")
        with self._lock:
            block_ids = self._targets.begin_chunk(link, chunk)
        try:
            channel.receive(chunk, block_ids)
        except BaseException:
            with self._lock:
                self._targets.abort_chunk(chunk)
            raise
        if block_ids is not None:
            with self._lock:
                self._targets.end_chunk(chunk, time.monotonic())

    def _tick_idle(self) -> None:
        """On the accepting thread: an idle engine runs no step, and grants still run out."""
        with self._lock:
            self._do_source(self._known_sources().tick(time.monotonic()))

    def _serve(self, sock: socket.socket) -> None:
        """On the accepting thread."""
        _, identity = self._registered()
        with self._lock:
            if self._closing:
                sock.close()
            else:
                self._new_link().serve(sock, identity)

    def _link_to(self, address: str, epoch: str) -> Link:
        link = self._outgoing.get((address, epoch))
        if link is None or link.is_down:
            _, identity = self._registered()
            link = self._new_link()
            self._outgoing[address, epoch] = link
            link.dial(address, identity, epoch, next(self._slots))
        return link

    def _new_link(self) -> Link:
        # A link that is down stays here until its threads are over: `close` waits for them.
        self._links = {link for link in self._links if not link.is_over}
        local, _ = self._registered()
        timeouts = LinkTimeouts(self._settings.handshake_timeout_s, self._settings.send_timeout_s)
        link = Link(self, local, self._transports, timeouts)
        self._links.add(link)
        return link

    # -- doing what the tables decided

    def _do_source(self, actions: Iterable[src.SourceAction[Link]]) -> None:
        for action in actions:
            match action:
                case src.PushChunk():
                    action.link.run(partial(self._push, chunk=action))
                case src.SendDone():
                    action.link.run(partial(self._send_done, done=action))
                case src.SendFail(link, transfer_id, reason):
                    link.send_next(Fail(transfer_id, reason))
                case src.SendAlive(link, transfer_id):
                    link.send_next(Alive([transfer_id]))
                case src.Release(request_id):
                    self._sent.add(request_id)

    def _do_target(self, actions: Iterable[tgt.TargetAction[Link]]) -> None:
        for action in actions:
            match action:
                case tgt.SendGrant(link, grant):
                    link.send(grant)
                case tgt.SendCancel(link, transfer_id, capability):
                    link.send(Cancel(transfer_id, capability))
                case tgt.SendAck(link, transfer_id):
                    link.send(Ack(transfer_id))
                case tgt.DropLink(link):
                    link.close("the source did not answer in time")

    def _push(self, link: Link, chunk: src.PushChunk[Link]) -> None:
        """On the writer thread of the link."""
        channel, (local, _) = link.source, self._registered()
        if channel is None:
            raise KvTransferError("a target was asked to push")
        with self._lock:
            if not self._known_sources().begin_copy(chunk):
                return
        count = len(chunk.source_ids)
        size = count * local.region.geometry.block_bytes
        begun, copied = time.monotonic(), False
        try:
            channel.push(
                Chunk(chunk.transfer_id, chunk.first, count, size),
                chunk.source_ids,
                chunk.target_ids,
            )
            copied = True
        finally:
            now = time.monotonic()
            seconds = now - begun
            with self._lock:
                self._do_source(self._known_sources().end_copy(chunk, now, seconds, copied=copied))
                self._copies.notify_all()
                if copied:
                    self.counters.pushed_bytes += size
                    self.counters.pushed_blocks += count
                    self.counters.push_s += seconds

    def _send_done(self, link: Link, done: src.SendDone[Link]) -> None:
        """On the writer thread, behind the last chunk."""
        with self._lock:
            figures = self._known_sources().done_figures(done, time.monotonic())
        if figures is not None:
            tokens, push_s, exposed_s = figures
            link.send_now(Done(done.transfer_id, tokens, push_s, exposed_s))

    def _wait_for_copies(self, transfer_ids: Sequence[str]) -> None:
        sources = self._known_sources()

        def running() -> list[Link]:
            links = (sources.copying_over(transfer_id) for transfer_id in transfer_ids)
            return [link for link in links if link is not None]

        if self._copies.wait_for(lambda: not running(), self._settings.preempt_timeout_s):
            return
        for link in running():
            link.close("the engine wants the blocks back")
        if not self._copies.wait_for(lambda: not running(), COPY_END_S):
            raise KvTransferError(f"a copy of preempted blocks did not end in {COPY_END_S} s")

    def _check_fences(self) -> None:
        for link in list(self._fencing):
            if link.target is None or link.target.idle():
                self._targets.fenced(link)
            if not self._targets.uses(link):
                self._fencing.discard(link)

    def _known_sources(self) -> SourceTable[Link]:
        if self._sources is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._sources

    def _registered(self) -> tuple[LocalKv, Identity]:
        if self._local is None or self._identity is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._local, self._identity
