"""The state of a worker's KV plane, for the debug page and for metrics."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from pdserve.types import KvLedger, KvReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.peers import Peers

PRODUCER, CONSUMER = "producer", "consumer"
UP = "up"


@dataclass(frozen=True, slots=True)
class TransferView:
    """One transfer. `side` is this worker's role in it; `peer` is the instance id or address of the
    other worker. `blocks` counts this worker's blocks, `moved_blocks` the consumer's.
    `hold_left_s` is None while no hold runs."""

    transfer_id: str
    request_id: str
    side: str
    state: str
    peer: str
    transport: str
    blocks: int
    moved_blocks: int
    moved_bytes: int
    age_s: float | None = None
    hold_left_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkView:
    """One link. `state` is `connecting`, `up`, or `down` while its threads end."""

    side: str
    state: str
    transport: str
    peer: str
    address: str
    age_s: float
    reason: str = ""
    downgrade: str = ""


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """The KV plane of one process. `held_bytes` is the memory of transports outside the KV cache;
    `totals` count since the process started."""

    taken_at: float  # monotonic
    transfers: tuple[TransferView, ...] = ()
    links: tuple[LinkView, ...] = ()
    quarantined_slots: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KvState:
    """A worker's ledger, and the KV plane of each of its tensor-parallel ranks."""

    ledger: KvLedger
    ranks: tuple[KvSnapshot, ...] = ()

    def report(self) -> KvReport:
        totals: Counter[str] = Counter()
        links: Counter[str] = Counter()
        slower: dict[str, str] = {}
        for rank in self.ranks:
            totals.update(rank.totals)
            links.update(link.transport for link in rank.links if link.state == UP)
            slower |= {x.peer: x.downgrade for x in rank.links if x.state == UP and x.downgrade}
        return KvReport(
            self.ledger,
            quarantined_slots=sum(rank.quarantined_slots for rank in self.ranks),
            links=dict(links),
            downgrades=slower,
            totals=dict(totals),
            held_bytes=sum(rank.held_bytes for rank in self.ranks),
        )


def take(peers: Peers) -> KvSnapshot:
    """Take a snapshot. May be called on any thread."""
    now = time.monotonic()
    usages = [transport.usage() for transport in peers.transports.values()]
    totals = {name: value for usage in usages for name, value in usage.totals.items()}
    with peers.driver.lock:
        totals |= asdict(peers.driver.counters)
        totals["expired_leases"] = peers.driver.producer.expired_holds
        totals["refused_subscriptions"] = peers.driver.producer.refused_subscriptions
        totals["receive_timeouts"] = peers.driver.consumer.timeouts
        totals["digest_mismatches"] = peers.driver.consumer.digest_mismatches
        return KvSnapshot(
            taken_at=now,
            transfers=(*_sent(peers, now), *_received(peers, now)),
            links=tuple(_links(peers, now)),
            quarantined_slots=sum(usage.lost_slots for usage in usages),
            held_bytes=sum(usage.held_bytes for usage in usages),
            totals=totals,
        )


def _shown(transfer_id: str) -> str:
    """Return a hash of a transfer id for display. The id itself is a secret: without certificates
    or a token, it is enough to fetch the KV."""
    return hashlib.sha256(transfer_id.encode()).hexdigest()[:12]


def _joined(values: Iterator[str]) -> str:
    return "+".join(sorted(set(values)))


def _sent(peers: Peers, now: float) -> Iterator[TransferView]:
    for t in peers.driver.producer:
        links: list[Link] = [reader.link for reader in t.readers]
        yield TransferView(
            transfer_id=_shown(t.transfer_id),
            request_id=t.request_id,
            side=PRODUCER,
            state=t.state,
            peer=_joined(link.peer for link in links),
            transport=_joined(link.transport for link in links),
            blocks=sum(map(len, t.tables)),
            moved_blocks=min((reader.sent_blocks for reader in t.readers), default=0),
            moved_bytes=sum(reader.sent_bytes for reader in t.readers),
            age_s=now - t.began_at,
            hold_left_s=None if t.hold_end is None else max(0.0, t.hold_end - now),
        )
    for early in peers.driver.producer.early():
        yield TransferView(
            transfer_id=_shown(early.subscription.transfer_id),
            request_id="",
            side=PRODUCER,
            state="subscribed early",
            peer=early.link.peer,
            transport=early.link.transport,
            blocks=0,
            moved_blocks=0,
            moved_bytes=0,
            hold_left_s=max(0.0, early.expires_at - now),
        )


def _received(peers: Peers, now: float) -> Iterator[TransferView]:
    for transfer, part in peers.driver.consumer:
        yield TransferView(
            transfer_id=_shown(part.transfer_id),
            request_id=transfer.request_id,
            side=CONSUMER,
            state=transfer.state,
            peer=part.link.peer,
            transport=part.link.transport,
            blocks=part.subscription.num_blocks,
            moved_blocks=part.received_blocks,
            moved_bytes=part.received_bytes,
            age_s=now - part.began_at,
        )


def _links(peers: Peers, now: float) -> Iterator[LinkView]:
    for link in peers.links:
        if not link.is_over:
            state = "down" if link.is_down else UP if link.transport else "connecting"
            yield LinkView(
                side=CONSUMER if link.is_dialled else PRODUCER,
                state=state,
                transport=link.transport,
                peer=link.peer_instance_id,
                address=link.peer_address,
                age_s=now - link.opened_at,
                reason=link.reason,
                downgrade=link.downgrade,
            )
