"""What a worker's KV plane is doing at one moment, for people and for metrics. Values, and how they
are read off the tables and links; whoever calls holds the lock around those."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.transport.base import Account, Accounts
from pdserve.types import KvLedger, KvReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kv_transfer.counters import TransferCounters
    from kv_transfer.layout import KvGeometry
    from kv_transfer.link import Link
    from kv_transfer.source import SourceTable
    from kv_transfer.source_transfer import Reader
    from kv_transfer.target import TargetTable
    from kv_transfer.transport.base import Transport

SOURCE, TARGET = "source", "target"
UP = "up"


@dataclass(frozen=True, slots=True)
class TransferView:
    """One transfer. `side` is this worker's part in it; `peer` is the other's name or address, ""
    while it is not known. `blocks` are this worker's, `moved_blocks` the target's.
    `lease_left_s` is None while no lease runs.
    """

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
    lease_left_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkView:
    """One link. `side` is this worker's part in every transfer over it; `state` is `connecting`,
    `up`, or `down` while its threads end."""

    side: str
    state: str
    transport: str
    peer: str
    peer_instance_id: str
    address: str
    age_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """The KV plane of one process that holds a KV cache. `taken_at` is on the monotonic clock.
    `held_bytes` is what transports
    hold beside the cache, on its device; `totals` count since the process started."""

    taken_at: float
    transfers: tuple[TransferView, ...] = ()
    links: tuple[LinkView, ...] = ()
    quarantined_slots: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KvState:
    """A worker's ledger, and the KV plane of each of its processes: one a tensor-parallel rank."""

    ledger: KvLedger
    ranks: tuple[KvSnapshot, ...] = ()

    def report(self) -> KvReport:
        """In figures. Every rank counts its own share of bytes, and a failure of its own part."""
        totals: Counter[str] = Counter()
        links: Counter[str] = Counter()
        for rank in self.ranks:
            totals.update(rank.totals)
            links.update(link.transport for link in rank.links if link.state == UP)
        return KvReport(
            self.ledger,
            quarantined_slots=sum(rank.quarantined_slots for rank in self.ranks),
            links=dict(links),
            totals=dict(totals),
            held_bytes=sum(rank.held_bytes for rank in self.ranks),
        )


def transfer_views(
    sources: SourceTable[Link], targets: TargetTable[Link], geometry: KvGeometry, now: float
) -> Iterator[TransferView]:
    """Every transfer that either table knows of; one that comes in shares, share by share."""
    for s in sources:
        links = [reader.link for reader in s.readers]
        yield TransferView(
            transfer_id=s.transfer_id,
            request_id=s.request_id,
            side=SOURCE,
            state=s.state.value,
            peer="+".join(sorted({peer_of(link) for link in links})),
            transport="+".join(sorted({link.transport for link in links})),
            blocks=len(s.block_ids),
            moved_blocks=min((reader.sent_blocks for reader in s.readers), default=0),
            moved_bytes=sum(_sent_bytes(r, geometry, sources.block_size) for r in s.readers),
            age_s=now - s.began_at,
            lease_left_s=None if s.lease_end is None else max(0.0, s.lease_end - now),
        )
    for early in sources.early():
        yield TransferView(
            transfer_id=early.grant.transfer_id,
            request_id="",
            side=SOURCE,
            state="granted early",
            peer=peer_of(early.link),
            transport=early.link.transport,
            blocks=0,
            moved_blocks=0,
            moved_bytes=0,
            lease_left_s=max(0.0, early.until - now),
        )
    for t in targets:
        yield TransferView(
            transfer_id=t.transfer_id,
            request_id=t.request_id,
            side=TARGET,
            state=t.state.value,
            peer=peer_of(t.link),
            transport=t.link.transport,
            blocks=len(t.grant.block_ids),
            moved_blocks=t.received_blocks,
            moved_bytes=t.received_bytes,
            age_s=now - t.began_at,
        )


def link_views(links: Iterable[Link], now: float) -> Iterator[LinkView]:
    """Every link that has a thread left."""
    for link in links:
        if link.is_over:
            continue
        state = "down" if link.is_down else UP if link.transport else "connecting"
        yield LinkView(
            side=TARGET if link.is_dialled else SOURCE,
            state=state,
            transport=link.transport,
            peer=link.peer_instance_id,
            peer_instance_id=link.peer_instance_id,
            address=link.peer_address,
            age_s=now - link.opened_at,
            reason=link.reason,
        )


def account_of(transports: Iterable[Transport]) -> Account:
    """Of all of them together."""
    accounts = [each.account() for each in transports if isinstance(each, Accounts)]
    return Account(
        sum(account.held_bytes for account in accounts),
        {name: value for account in accounts for name, value in account.totals.items()},
    )


def totals_of(
    counters: TransferCounters,
    sources: SourceTable[Link],
    targets: TargetTable[Link],
    account: Account,
) -> dict[str, float]:
    """What is counted, wherever it is."""
    return {
        **account.totals,
        **asdict(counters),
        "expired_leases": sources.expired_leases,
        "receive_timeouts": targets.timeouts,
    }


def _sent_bytes(reader: Reader[Link], geometry: KvGeometry, block_size: int) -> int:
    size = geometry.page_bytes if reader.part is None else reader.part.size
    tokens = reader.sent_blocks * (reader.grant.block_size or block_size)
    return tokens * geometry.num_layers * size // block_size


def peer_of(link: Link) -> str:
    """The other worker's instance id, or its address until it has told one."""
    return link.peer_instance_id or link.peer_address
