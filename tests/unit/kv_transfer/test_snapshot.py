"""What a look at the KV plane shows while transfers run, wait, and are given up."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kv_transfer.protocol.snapshot import CONSUMER, PRODUCER, KvSnapshot, KvState, LinkView
from kv_transfer.protocol.transport import TransportUsage
from pdserve.types import KvLedger
from tests.support.kv_pair import FROM, TO, KvWorkers, N, settle, until
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from tests.support.kv_pair import KvWorker


def look(worker: KvWorker) -> KvSnapshot:
    snapshot = worker.look()
    json.dumps(asdict(snapshot))
    return snapshot


def test_a_transfer_and_its_link_are_seen_from_both_sides_until_it_is_over(
    kv_workers: KvWorkers,
) -> None:
    source, target = kv_workers.pair()
    target.start(source, "t", TO, N)
    until(lambda: [t for t in look(source).transfers if t.state == "subscribed early"], target)
    early = look(source).transfers
    source.expect("t")
    source.compute("t", FROM[:2], 8)
    for worker in (source, target):  # a consumer may know of a chunk before its producer counts it
        until(lambda: look(worker).transfers[0].moved_blocks == 2, source, target)  # noqa: B023

    (sending,), (receiving,) = look(source).transfers, look(target).transfers
    # Ids open transfers, so that none is shown.
    name = hashlib.sha256(b"t").hexdigest()[:12]
    assert early[0].transfer_id == name
    assert (sending.transfer_id, sending.request_id, sending.side) == (name, "p-t", PRODUCER)
    assert (receiving.transfer_id, receiving.request_id, receiving.side) == (name, "d-t", CONSUMER)
    assert (sending.state, receiving.state) == ("sending", "receiving")
    assert (sending.blocks, sending.moved_blocks) == (2, 2)
    assert (receiving.blocks, receiving.moved_blocks) == (4, 2)
    assert sending.moved_bytes == receiving.moved_bytes > 0
    assert sending.transport == receiving.transport
    assert receiving.peer == source.instance_id
    assert sending.hold_left_s is None
    assert sending.age_s is not None
    assert sending.age_s >= 0

    (served,), (dialled,) = look(source).links, look(target).links
    assert (served.side, dialled.side) == (PRODUCER, CONSUMER)
    assert served.state == dialled.state == "up"
    assert served.transport == dialled.transport == sending.transport
    assert (served.peer, dialled.peer) == (target.instance_id, source.instance_id)
    assert dialled.address == source.address

    source.compute("t", FROM, N)
    source.finish("t")
    settle(source, target)
    for worker in (source, target):
        assert look(worker).transfers == ()
    assert look(source).totals["pushed_blocks"] == 4
    assert look(target).totals["received_bytes"] == look(source).totals["pushed_bytes"] > 0
    target.half.close()
    until(lambda: look(source).links == ())


def test_a_lease_counts_down_and_its_end_is_counted(tcp_workers: KvWorkers) -> None:
    source = tcp_workers.worker(hold_s=WAIT_S)
    source.prefill("t", FROM, N)
    (held,) = look(source).transfers
    assert (held.state, held.peer, held.blocks) == ("expected", "", 4)
    assert held.hold_left_s is not None
    assert 0 < held.hold_left_s <= WAIT_S
    with source.driver.lock:
        source.driver.producer._transfers["t"].hold_end = 0.0
    until(lambda: not look(source).transfers, source)
    assert look(source).totals["expired_leases"] == 1


def test_staging_that_a_transport_has_lost_stays_quarantined(shm_rig: KvWorkers) -> None:
    worker = shm_rig.worker()
    worker.transports[0].usage = lambda: TransportUsage(lost_slots=2)  # type: ignore[method-assign]
    assert look(worker).quarantined_slots == 2


def test_ranks_are_added_up_and_only_links_that_are_up_are_counted() -> None:
    def link(state: str, transport: str) -> LinkView:
        return LinkView(PRODUCER, state, transport, "", "", 1.0)

    ledger = KvLedger(2, 1, 2, 2)
    one = KvSnapshot(0.0, (), (link("up", "shm"), link("down", "shm")), 1, {"failures": 1.0})
    two = KvSnapshot(0.0, (), (link("up", "shm"), link("connecting", "")), 2, {"failures": 2.0})
    report = KvState(ledger, (one, two)).report()
    assert report.ledger == ledger
    assert (report.links, report.quarantined_slots) == ({"shm": 2}, 3)
    assert report.totals == {"failures": 3.0}
