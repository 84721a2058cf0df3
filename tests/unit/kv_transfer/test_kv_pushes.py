"""Pushes that a test holds, breaks and damages: the loopback transport lets it."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.errors import LinkClosed
from kv_transfer.memory import KvRegion, PeerMemory
from kv_transfer.messages import Chunk, Grant
from kv_transfer.transport.base import Wire
from kv_transfer.transport.shm import ShmTransport
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.rig import FROM, TO, N, Rig, check_exact, settle, until

if TYPE_CHECKING:
    from kv_transfer.messages import Message
    from kv_transfer.transport.loopback import LoopbackTransport
    from tests.unit.kv_transfer.conftest import RigOf


def wire_of(sock: socket.socket, sent: list[bytes]) -> Wire:
    """A link's, of a link that nothing comes over."""

    def read() -> Message:
        raise LinkClosed("nothing comes")

    return Wire(
        sock,
        sent.append,
        lambda view: None,
        lambda limit: memoryview(b""),
        lambda: False,
        read,
        lambda seconds: True,
        lambda message: None,
        lambda: False,
    )


def test_a_damaged_block_would_be_noticed(loopback_rig: Rig, loopback: LoopbackTransport) -> None:
    source, target = loopback_rig.pair()
    before = target.cache.blocks()
    target.start(source, "t", TO, N)

    def swap(chunk: Chunk, source_ids: list[int], target_ids: list[int]) -> None:
        source_ids[0], source_ids[1] = source_ids[1], source_ids[0]

    loopback.on_push = swap
    source.prefill("t", FROM, N)
    settle(source, target)
    with pytest.raises(AssertionError):
        check_exact(source, target, before)


def test_a_push_that_breaks_off_ends_the_link_and_both_requests(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    source, target = loopback_rig.pair()

    def refuse(chunk: Chunk, source_ids: list[int], target_ids: list[int]) -> None:
        raise OSError("broken by the test")

    loopback.on_push = refuse
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert source.sent == ["p-t"]


def test_blocks_are_not_released_under_a_copy(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    source, target = loopback_rig.pair()
    inside, go_on = threading.Event(), threading.Event()

    def hold(chunk: Chunk, source_ids: list[int], target_ids: list[int]) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)

    loopback.on_push = hold
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    assert inside.wait(WAIT_S)
    source.end_lease("t")
    source.collect()
    assert source.half.links.sources.expired_leases == 1
    assert source.sent == []
    go_on.set()
    settle(source, target)
    assert source.sent == ["p-t"]
    assert target.failures == {"d-t": "the lease ran out"}


def test_an_answer_to_a_cancel_overtakes_what_waits(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    """A cancel is answered after the copy that runs, not after all that is queued for others."""
    source, target = loopback_rig.pair(chunk_bytes=geometry().block_bytes)
    inside, go_on, pushed = threading.Event(), threading.Event(), []

    def hold(chunk: Chunk, source_ids: list[int], target_ids: list[int]) -> None:
        pushed.append(chunk.transfer_id)
        inside.set()
        assert go_on.wait(WAIT_S)
        if len(pushed) > 1:
            until(lambda: target.ended == ["d-b"], target)

    loopback.on_push = hold
    target.start(source, "a", TO, N)
    target.start(source, "b", [0, 1, 2, 3], N)
    source.prefill("a", FROM, N)
    assert inside.wait(WAIT_S)
    source.prefill("b", FROM, N)
    target.cancel("b")
    until(lambda: "b" in source.half.links.sources._tombstones, source)
    go_on.set()
    settle(source, target)
    assert target.failures == {"d-b": "cancelled"}
    assert pushed == ["a"] * 4
    assert target.arrivals.keys() == {"d-a"}


def test_a_step_waits_for_the_copy_of_preempted_blocks(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    source, target = loopback_rig.pair()
    before = target.cache.blocks()
    inside, go_on, back = threading.Event(), threading.Event(), threading.Event()

    def hold(chunk: Chunk, source_ids: list[int], target_ids: list[int]) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)
        assert not back.is_set()

    loopback.on_push = hold
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM, N)
    assert inside.wait(WAIT_S)

    def step() -> None:
        source.step(preempted=["t"])
        back.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    assert not back.wait(0.05)
    go_on.set()
    stepping.join(WAIT_S)
    assert back.is_set()
    loopback.on_push = None
    source.compute("t", FROM, N)
    source.finish("t")
    settle(source, target)
    assert target.failed == []
    check_exact(source, target, before)


def test_a_worker_closes_after_the_copies_of_links_that_are_already_down(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    """When `close` returns, the cache may be unmapped."""
    source, target = loopback_rig.pair()
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def hold(chunk: Chunk, source_ids: list[int], target_ids: list[int]) -> None:
        inside.set()
        assert go_on.wait(WAIT_S)
        assert not closed.is_set()

    loopback.on_push = hold
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    assert inside.wait(WAIT_S)
    (link,) = source.half.links._all
    link.close("broken by the test")
    until(lambda: target.failed, target)
    target.start(source, "u", TO, N)
    until(lambda: len(source.half.links._all) == 2, target)

    def close() -> None:
        source.half.close()
        closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    assert not closed.wait(0.05)
    go_on.set()
    closing.join(WAIT_S)
    assert closed.is_set()
    assert link.is_over


@pytest.mark.parametrize("who", ["reader", "step"])
def test_a_target_stays_mapped_until_the_copy_into_it_has_returned(
    rig_of: RigOf, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = rig_of("shm").pair()
    inside, go_on, mapped = threading.Event(), threading.Event(), []
    copy, unmap = KvRegion.copy_from, PeerMemory.close

    def held(self: KvRegion, *arguments: Any) -> int:
        inside.set()
        assert go_on.wait(WAIT_S)
        mapped.append(True)
        return copy(self, *arguments)

    def noticed(self: PeerMemory) -> None:
        # The target's mapping of the source's cache has no copy to wait for.
        (link,) = source.half.links._all
        assert mapped or self is not getattr(link.source, "_peer")  # noqa: B009
        unmap(self)

    monkeypatch.setattr(KvRegion, "copy_from", held)
    monkeypatch.setattr(PeerMemory, "close", noticed)
    stepping = threading.Thread(target=source.prefill, args=["t", FROM, N])
    if who == "step":
        target.start(source, "t", TO, N)
        until(lambda: len(source.half.links.sources), source)
        stepping.start()
    else:
        stepping.start()
        stepping.join(WAIT_S)
        target.start(source, "t", TO, N)
    assert inside.wait(WAIT_S)
    (link,) = source.half.links._all
    link.close("broken by the test")
    link.join(0.05)
    assert not link.is_over
    go_on.set()
    stepping.join(WAIT_S)
    until(lambda: link.is_over, source, target)
    settle(source, target)
    assert target.failed == ["d-t"]


def test_nothing_is_written_into_memory_that_a_target_has_taken_back(rig_of: RigOf) -> None:
    """A source that was stopped, or slow, wakes up behind the target's decision."""
    source, target = rig_of("shm").pair()
    before = target.cache.snapshot()
    transport, sent = ShmTransport(), list[bytes]()
    ours, theirs = socket.socketpair()
    wire = wire_of(ours, sent)
    offer = transport.offer(target.cache.local, 9)
    assert offer is not None
    sending = transport.source(source.cache.local, offer, wire)
    receiving = transport.target(target.cache.local, 9, wire)
    assert receiving.idle()
    with pytest.raises(LinkClosed, match="taken its memory back"):
        sending.push(Chunk("t", 0, 1, geometry().block_bytes), [0], [0])
    assert sent == []
    assert target.cache.snapshot() == before
    sending.close()
    transport.close()
    ours.close()
    theirs.close()


def test_what_was_read_before_a_link_went_down_binds_nothing_to_it(loopback_rig: Rig) -> None:
    """Another thread may close the link while its reader holds a message."""
    source, target = loopback_rig.pair()
    target.start(source, "t", TO, N)
    until(lambda: len(source.half.links.sources), source)
    (link,) = source.half.links._all
    link.close("broken by the test")
    source.half.links.on_message(link, Grant("u", 0, N, TO))
    settle(source, target)
    assert target.failed == ["d-t"]
