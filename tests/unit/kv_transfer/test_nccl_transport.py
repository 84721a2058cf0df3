"""The nccl transport between two worker halves, over a fake NCCL and a GPU in host memory: what it
refuses, and what becomes of slots and blocks when something on the way fails."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.messages import Chunk, Inner, pack
from kv_transfer.nccl.actions import PairTimeouts
from kv_transfer.nccl.binding import Result
from kv_transfer.nccl.messages import Moved, Offer
from kv_transfer.settings import KvSettings
from kv_transfer.snapshot import account_of
from kv_transfer.transport.nccl import ONE_GPU_VARIABLE, NcclTransport, limits_from
from kv_transfer.transport.tcp import TcpTransport
from tests.patience import WAIT_S
from tests.unit.kv_transfer import fake_device
from tests.unit.kv_transfer.caches import Cache, geometry
from tests.unit.kv_transfer.fake_device import FakeDevice, NcclWorld
from tests.unit.kv_transfer.rig import FROM, TO, N, Rig, Worker, check_exact, settle, until
from tests.unit.kv_transfer.test_kv_pushes import wire_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.messages import Message


def nccl_of(worker: Worker) -> NcclTransport:
    transport = worker.transports[0]
    assert isinstance(transport, NcclTransport)
    return transport


def device_of(worker: Worker) -> FakeDevice:
    device = nccl_of(worker).device
    assert isinstance(device, FakeDevice)
    return device


@pytest.fixture
def world() -> NcclWorld:
    return NcclWorld()


@pytest.fixture
def nccl_rig(world: NcclWorld, clean: None) -> Iterator[Rig]:
    made = Rig(world.transport)
    yield made
    made.close()


def move(source: Worker, target: Worker, transfer_id: str = "t") -> None:
    target.start(source, transfer_id, TO, N)
    source.prefill(transfer_id, FROM, N)
    settle(source, target)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ({"version": 23007}, {"version": 23202}, "NCCL 23007 here and 23202 there"),
        ({"uuid": "GPU-x"}, {"uuid": "GPU-x"}, "GPU GPU-x, and NCCL takes a GPU once"),
        ({"slot_bytes": 191}, {}, "a slot of 191 bytes holds no block of 192"),
        ({}, {"slot_bytes": 191}, None),
    ],
)
def test_what_nccl_cannot_join_goes_over_the_next_transport(
    world: NcclWorld,
    nccl_rig: Rig,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`theirs` is the target's; a slot too small there is not even offered."""
    source = nccl_rig.worker(transports=[world.transport(**ours), TcpTransport()])
    target = nccl_rig.worker(transports=[world.transport(**theirs), TcpTransport()])
    move(source, target)
    assert target.arrivals["d-t"].report.transport == "tcp"
    assert source.half.counters.downgrades == (reason is not None)
    assert (reason or "a slot of 191 bytes holds no block of 192") in caplog.text


@pytest.mark.parametrize(("version", "used"), [(23003, "nccl"), (23002, "tcp")])
def test_one_gpu_twice_is_for_an_nccl_that_can_and_was_told_to(
    world: NcclWorld, nccl_rig: Rig, monkeypatch: pytest.MonkeyPatch, version: int, used: str
) -> None:
    monkeypatch.setenv(ONE_GPU_VARIABLE, "1")

    def both() -> list[Any]:
        return [world.transport("GPU-x", version), TcpTransport()]

    source, target = nccl_rig.worker(transports=both()), nccl_rig.worker(transports=both())
    move(source, target)
    assert target.arrivals["d-t"].report.transport == used


@pytest.mark.parametrize("layers", [1, 3, 12])
def test_a_chunk_is_one_send_a_slot_whatever_its_layers(nccl_rig: Rig, layers: int) -> None:
    """Four blocks of 192 bytes, two of which fit a slot of 512."""
    source, target = nccl_rig.pair(shape=geometry(layers=layers, page=192 // layers))
    before = target.cache.blocks()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    settle(source, target)
    check_exact(source, target, before)
    assert device_of(source)._nccl.calls.count("send") == 2
    assert device_of(target)._nccl.calls.count("recv") == 2


def test_a_part_is_gathered_while_the_one_before_is_on_its_way(
    world: NcclWorld, nccl_rig: Rig
) -> None:
    source, target = nccl_rig.pair()
    before = target.cache.blocks()
    world.fabric.is_held = True
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    until(lambda: "send" in device_of(source)._nccl.calls, source, target)
    until(lambda: nccl_of(source).held_slots == 2, source, target)
    assert device_of(source)._nccl.calls.count("send") == 1
    world.fabric.is_held = False
    settle(source, target)
    check_exact(source, target, before)


@pytest.mark.parametrize("key", ["version", "gpu", "slot_bytes"])
def test_an_offer_of_something_else_is_not_taken(world: NcclWorld, key: str) -> None:
    transport, cache = world.transport(), Cache(geometry(), seed=1)
    offer = transport.offer(cache.local, 1)
    assert offer is not None
    for wrong in (None, [], True if key == "gpu" else "x"):
        with pytest.raises(KvTransferError, match="none of NCCL"):
            transport.source(cache.local, {**offer, key: wrong}, None)  # type: ignore[arg-type]
    transport.close()


def test_a_communicator_that_breaks_costs_no_transfer(world: NcclWorld, nccl_rig: Rig) -> None:
    """Aborted at both ends, made again, and the part that was on its way is sent again."""
    source, target = nccl_rig.pair()
    before = target.cache.blocks()
    world.fabric.is_held = True
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: "recv" in device_of(target)._nccl.calls, source, target)
    device_of(target)._nccl.break_comms(Result.REMOTE_ERROR)
    world.fabric.is_held = False
    settle(source, target)
    assert target.failed == []
    check_exact(source, target, before)
    assert device_of(source)._nccl.calls.count("abort") == 1
    assert nccl_of(source).lost_slots == nccl_of(target).lost_slots == 0


def test_a_communicator_that_breaks_again_fails_the_transfer_and_the_next_one_works(
    world: NcclWorld, nccl_rig: Rig
) -> None:
    source, target = nccl_rig.pair(lease_s=3600.0)
    before = target.cache.snapshot()
    device_of(source)._nccl.post_result = Result.SYSTEM_ERROR
    move(source, target)
    assert target.failed == ["d-t"]
    assert source.sent == ["p-t"]
    assert target.cache.snapshot() == before
    device_of(source)._nccl.post_result = Result.IN_PROGRESS
    move(source, target, "u")
    assert target.arrivals.keys() == {"d-u"}


@pytest.mark.parametrize("lost_at", ["source", "target"])
def test_a_gpu_that_does_not_come_to_rest_costs_the_slot(
    world: NcclWorld, nccl_rig: Rig, monkeypatch: pytest.MonkeyPatch, lost_at: str
) -> None:
    quick = PairTimeouts(WAIT_S, WAIT_S, 20.0, 1.0, abort_s=0.05, quarantine_s=0.05)
    monkeypatch.setattr(fake_device, "TIMEOUTS", quick)
    source, target = nccl_rig.pair(lease_s=3600.0)
    before = target.cache.snapshot()
    world.fabric.is_held = True
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: "recv" in device_of(target)._nccl.calls, source, target)
    until(lambda: "send" in device_of(source)._nccl.calls, source, target)
    stuck = source if lost_at == "source" else target
    device_of(stuck).is_stuck = True
    device_of(stuck)._nccl.break_comms(Result.REMOTE_ERROR)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert target.cache.snapshot() == before
    until(lambda: nccl_of(stuck).lost_slots == 1, source, target)
    until(lambda: nccl_of(source).held_slots == nccl_of(target).held_slots == 0)
    device_of(stuck).is_stuck = False


def test_blocks_are_not_free_before_a_scatter_has_ended(
    nccl_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is down and its reader is gone; the GPU may still write into the blocks."""
    monkeypatch.setattr("kv_transfer.device.waiting.COPY_S", 0.0)
    source, target = nccl_rig.pair(lease_s=3600.0)
    device_of(target).holds = True
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
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
    assert nccl_of(target).lost_slots == 1


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_gpu_that_refuses_a_copy_fails_the_transfer(nccl_rig: Rig, end: str) -> None:
    source, target = nccl_rig.pair(lease_s=3600.0)
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


def test_a_worker_closes_in_the_middle_of_a_chunk(world: NcclWorld, nccl_rig: Rig) -> None:
    source, target = nccl_rig.pair(lease_s=3600.0)
    world.fabric.is_held = True
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: "recv" in device_of(target)._nccl.calls, source, target)
    source.close()
    until(lambda: target.is_empty, target)
    assert target.failed == ["d-t"]


def test_many_links_share_few_slots(world: NcclWorld, nccl_rig: Rig) -> None:
    """Two slots a direction and process, and three peers each way: nobody waits for ever."""
    shape = geometry()
    sources = [nccl_rig.worker(chunk_bytes=4 * shape.block_bytes) for _ in range(3)]
    targets = [nccl_rig.worker(chunk_bytes=4 * shape.block_bytes) for _ in range(3)]
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


# -- what a peer may say


class Script:
    """A target's end whose peer says what the test wrote."""

    def __init__(self, world: NcclWorld, says: list[Message]) -> None:
        self.cache = Cache(geometry(), seed=1)
        self.before = self.cache.snapshot()
        self.transport = world.transport(op_timeout_s=0.2)
        ours, self.theirs = socket.socketpair()
        self.sock = ours
        self.says = iter(says)
        wire = wire_of(ours, [])
        object.__setattr__(wire, "read", lambda: next(self.says))
        self.channel = self.transport.target(self.cache.local, 1, wire)

    def close(self) -> None:
        self.channel.close()
        self.transport.close()
        self.sock.close()
        self.theirs.close()
        fake_device.check_closed(self.transport)


def inner(message: Message) -> Inner:
    return Inner(pack(message))


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ([inner(Moved())], "0 units came of a chunk of 4"),
        ([Chunk("t", 0, 1, 192)], "a chunk message inside a chunk"),
        ([Inner(b"\xc1")], "came damaged"),
        ([Inner(pack(Chunk("t", 0, 1, 192)))], "makes no sense"),
        ([inner(Offer(1, "1", 191))], "191 bytes were offered with 4 units to come"),
        ([inner(Offer(1, "1", 0))], "0 bytes were offered"),
        ([inner(Offer(1, "1", 3 * 192))], "576 bytes were offered"),
        ([inner(Offer(1, "1", 192)), inner(Moved())], "its time was over"),
    ],
)
def test_a_source_that_says_what_it_must_not_is_refused(
    world: NcclWorld, clean: None, says: list[Message], reason: str
) -> None:
    script = Script(world, says)
    with pytest.raises(KvTransferError, match=reason):
        script.channel.receive(Chunk("t", 0, 4, 4 * 192), TO)
    assert script.channel.idle()
    assert script.cache.snapshot() == script.before
    script.close()


def test_a_chunk_that_ends_before_it_began_is_refused(world: NcclWorld, clean: None) -> None:
    script = Script(world, [])
    with pytest.raises(ProtocolError, match="had not begun"):
        script.channel.told(pack(Moved()))  # type: ignore[attr-defined]
    script.close()


def test_the_settings_bound_what_nccl_may_use() -> None:
    limits = limits_from(
        KvSettings(
            nccl_max_ctas=2,
            nccl_budget_bytes=64 << 20,
            nccl_init_timeout_s=3.0,
            staging_slots=3,
            staging_slot_bytes=1 << 20,
            receive_timeout_s=7.0,
        )
    )
    assert limits.pool.config.max_ctas == 2
    assert limits.pool.budget_bytes == 64 << 20
    assert limits.pool.timeouts.init_s == 3.0
    assert (limits.staging.slots, limits.staging.slot_bytes) == (3, 1 << 20)
    assert limits.op_timeout_s == 7.0
    with pytest.raises(ValueError, match="budget_bytes"):
        limits_from(KvSettings(nccl_budget_bytes=1 << 20))


def test_threads_end_with_the_transport(world: NcclWorld, clean: None) -> None:
    transport, cache = world.transport(), Cache(geometry(), seed=1)
    assert account_of([TcpTransport(), transport]).held_bytes == 0
    ours, theirs = socket.socketpair()
    channel = transport.target(cache.local, 1, wire_of(ours, []))
    account = account_of([TcpTransport(), transport])
    assert account.held_bytes > 0
    assert account.totals["nccl_made"] == account.totals["nccl_evicted"] == 0
    assert [t for t in threading.enumerate() if t.name == "kv-nccl"]
    channel.close()
    transport.close()
    transport.close()
    ours.close()
    theirs.close()
