"""The cuda_ipc transport between two worker halves, over GPUs in host memory: what it refuses, and
what becomes of slots and blocks when a copy, a peer or a link fails."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.ipc.messages import Begin, Credit, Landed
from kv_transfer.messages import Chunk, Inner, pack
from kv_transfer.settings import KvSettings
from kv_transfer.transport.base import TransportUnavailable
from kv_transfer.transport.cuda_ipc import CudaIpcTransport, limits_from
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import Cache, geometry
from tests.unit.kv_transfer.fake_device import FakeSharingDevice, check_closed, ipc_transport
from tests.unit.kv_transfer.rig import FROM, TO, N, Rig, Worker, settle, until
from tests.unit.kv_transfer.test_kv_pushes import wire_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.messages import Message


@pytest.fixture
def ipc_rig(clean: None) -> Iterator[Rig]:
    made = Rig(ipc_transport)
    yield made
    made.close()


def ipc_of(worker: Worker) -> CudaIpcTransport:
    transport = worker.transports[0]
    assert isinstance(transport, CudaIpcTransport)
    return transport


def device_of(worker: Worker) -> FakeSharingDevice:
    device = ipc_of(worker).device
    assert isinstance(device, FakeSharingDevice)
    return device


def begin(source: Worker, target: Worker) -> None:
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)


def test_links_to_one_target_map_its_ring_once_and_unmap_it_with_the_last(ipc_rig: Rig) -> None:
    source, target = ipc_rig.pair()
    begin(source, target)
    settle(source, target)
    assert len(device_of(source).opened) == 1
    for link in list(target.half.links._all):
        link.close("broken by the test")
    until(lambda: not device_of(source).opened, source, target)
    target.start(source, "u", TO, N)
    source.prefill("u", FROM, N)
    settle(source, target)
    assert target.arrivals.keys() == {"d-t", "d-u"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "another"}, "different hosts"),
        ({"handle": "text"}, "no handle"),
        ({"handle": bytes(64)}, "cannot map the target's ring"),
        ({"slots": 0}, "no such slot"),
        ({"slots": 1 << 20}, "no such slot"),
        ({"slot": 1 << 62}, "no such slot"),
        ({"slot": True}, "slot is no number"),
        ({"slot_bytes": -1}, "slot_bytes is no number"),
        ({"slot_bytes": 191}, "a slot of 191 bytes holds no block of 192"),
        ({"path": "/etc/passwd"}, "no descriptor of a process"),
        ({"path": None}, "no path"),
        ({"inode": 1}, "leads to other memory"),
    ],
)
def test_an_offer_that_is_not_of_this_host_or_makes_no_sense_is_not_taken(
    clean: None, change: dict[str, Any], reason: str
) -> None:
    ours, theirs, cache = ipc_transport(), ipc_transport(), Cache(geometry(), seed=1)
    offer = theirs.offer(cache.local, 1)
    assert offer is not None
    with pytest.raises(TransportUnavailable, match=reason):
        ours.source(cache.local, {**offer, **change}, None)  # type: ignore[arg-type]
    for key in offer.keys() - {"transport", "boot_id"}:
        less = {k: v for k, v in offer.items() if k != key}
        with pytest.raises(TransportUnavailable):
            ours.source(cache.local, less, None)  # type: ignore[arg-type]
    for transport in (ours, theirs):
        transport.close()
        check_closed(transport)


def test_a_ring_whose_slots_hold_no_block_is_not_offered(clean: None) -> None:
    transport = ipc_transport(slot_bytes=191)
    assert transport.offer(Cache(geometry(), seed=1).local, 1) is None
    transport.close()


def test_slots_of_a_link_that_broke_inside_a_copy_wait_for_its_source(
    ipc_rig: Rig,
) -> None:
    """The ring is the target's again when the source can write no more, and not before."""
    source, target = ipc_rig.pair(lease_s=3600.0)
    before = target.cache.snapshot()
    device_of(source).slow = True
    begin(source, target)
    until(lambda: device_of(source).copies, source, target)
    for link in list(target.half.links._all):
        link.close("broken by the test")
    until(lambda: target.is_empty, target)
    assert target.failed == ["d-t"]
    until(lambda: len(ipc_of(target).quarantined), target)
    for _ in range(5):
        ipc_of(target).sweep()
        assert ipc_of(target).quarantined
    device_of(source).slow = False
    for event in device_of(source).copies:
        event.is_set = True

    def swept() -> bool:
        ipc_of(target).sweep()
        return not len(ipc_of(target).quarantined)

    until(swept, source, target)
    assert target.cache.snapshot() == before
    assert ipc_of(target).held_slots == 0
    target.start(source, "u", TO, N)
    source.prefill("u", FROM, N)
    settle(source, target)
    assert target.arrivals.keys() == {"d-u"}


def test_blocks_are_not_free_before_a_scatter_has_ended(
    ipc_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.device.waiting.COPY_S", 0.0)
    source, target = ipc_rig.pair(lease_s=3600.0)
    device_of(target).holds = True
    begin(source, target)
    until(lambda: target.half.links._fencing, source, target)
    (link,) = target.half.links._fencing
    link.join(WAIT_S)
    assert link.target is not None
    for _ in range(5):
        assert not link.target.idle()
        target.collect()
    assert target.ended == []
    for event in device_of(target).events:
        event.is_set = True
    settle(source, target)
    assert "a copy on the GPU did not end" in target.failures["d-t"]
    assert ipc_of(target).lost_slots == 1
    # The ring stays, for a slot of it is not at rest: what holds it is the test's to release.
    release(ipc_of(target))


def release(transport: CudaIpcTransport) -> None:
    """What stays with a transport that lost a slot."""
    transport.close()
    device = transport.device
    assert isinstance(device, FakeSharingDevice)
    for address in list(device.files):
        device.free(address)


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_gpu_that_refuses_a_copy_fails_the_transfer(ipc_rig: Rig, end: str) -> None:
    source, target = ipc_rig.pair(lease_s=3600.0)
    target.start(source, "t", TO, N)
    until(lambda: target.half.links._all, source, target)
    until(lambda: all(link.transport for link in target.half.links._all), source, target)
    before = target.cache.snapshot()
    device_of(source if end == "source" else target).refuses = True
    source.prefill("t", FROM, N)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert source.sent == ["p-t"]
    assert target.cache.snapshot() == before
    until(lambda: (ipc_of(target).sweep(), not ipc_of(target).held_slots)[1], source, target)


def test_many_links_share_few_slots(ipc_rig: Rig) -> None:
    sources = [ipc_rig.worker() for _ in range(3)]
    targets = [ipc_rig.worker() for _ in range(3)]
    for s, source in enumerate(sources):
        for t, target in enumerate(targets):
            blocks = [8 * s + n for n in range(6)]
            target.start(source, f"{s}-{t}", blocks, 24)
            source.prefill(f"{s}-{t}", [23 - b for b in range(6)], 24)
    until(lambda: all(len(t.ended) == 3 for t in targets), *sources, *targets)
    assert [t.failed for t in targets] == [[], [], []]
    for s, source in enumerate(sources):
        for target in targets:
            assert target.cache.block(8 * s + 5) == source.cache.block(18)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ([Chunk("t", 0, 1, 192)], "a chunk message inside a chunk"),
        ([Inner(pack(Landed(0, 192)))], "a landed message where a chunk begins"),
        ([Inner(pack(Begin(5)))], "4 units in 5 parts"),
        ([Inner(pack(Begin(2))), Inner(pack(Begin(2)))], "a begin message inside a chunk"),
        ([Inner(pack(Begin(2))), Inner(pack(Landed(0, 191)))], "191 bytes lie in a slot"),
        ([Inner(pack(Begin(2))), Inner(pack(Landed(0, 576)))], "576 bytes lie in a slot"),
        ([Inner(pack(Begin(2))), Inner(pack(Landed(7, 192)))], "slot 7 was filled"),
        ([Inner(b"\xc1")], "came damaged"),
    ],
)
def test_a_source_that_says_what_it_must_not_is_refused(
    clean: None, says: list[Message], reason: str
) -> None:
    cache = Cache(geometry(), seed=1)
    before = cache.snapshot()
    transport = ipc_transport()
    ours, theirs = socket.socketpair()
    wire, words = wire_of(ours, []), iter(says)
    object.__setattr__(wire, "read", lambda: next(words))
    channel = transport.target(cache.local, 1, wire)
    with pytest.raises(KvTransferError, match=reason):
        channel.receive(Chunk("t", 0, 4, 4 * 192), TO)
    assert channel.idle()
    assert cache.snapshot() == before
    channel.close()
    until(lambda: (transport.sweep(), not transport.held_slots)[1])
    transport.close()
    check_closed(transport)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("message", [Begin(1), Landed(0, 192), Credit(2)])
def test_a_target_may_grant_only_slots_that_it_has(clean: None, message: Message) -> None:
    ours, theirs, cache = ipc_transport(), ipc_transport(), Cache(geometry(), seed=1)
    offer = theirs.offer(cache.local, 1)
    assert offer is not None
    sock, other = socket.socketpair()
    channel = ours.source(cache.local, offer, wire_of(sock, []))
    with pytest.raises(ProtocolError, match="no place here"):
        channel.told(pack(message))  # type: ignore[attr-defined]
    channel.close()
    channel.close()
    for transport in (ours, theirs):
        transport.close()
        check_closed(transport)
    sock.close()
    other.close()


def test_the_settings_bound_the_ring() -> None:
    limits = limits_from(
        KvSettings(staging_slots=3, staging_slot_bytes=1 << 20, receive_timeout_s=7.0)
    )
    assert (limits.staging.slots, limits.staging.slot_bytes) == (3, 1 << 20)
    assert limits.op_timeout_s == 7.0
