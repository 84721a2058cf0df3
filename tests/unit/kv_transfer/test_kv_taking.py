"""What lies ready at a source of the same host is taken by its target's step; what cannot be taken
is granted and pushed as ever."""

from __future__ import annotations

import signal
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer import copying
from kv_transfer.digest import DigestMode
from kv_transfer.memory import KvRegion, PeerMemory
from kv_transfer.messages import Taken
from kv_transfer.transport import shm, shm_target
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.vllm import worker
from kv_transfer.vllm.step import TargetStart
from pdserve.capability import KEY_BYTES, Capability, CapabilityKey, WorkerStart, mint
from pdserve.errors import TransferCorrupted
from tests.patience import WAIT_S
from tests.unit.kv_transfer import source_process
from tests.unit.kv_transfer.caches import Cache, geometry
from tests.unit.kv_transfer.flips import FlippingTransport, Flips, flip
from tests.unit.kv_transfer.rig import (
    FROM,
    TO,
    TOKENS,
    N,
    Rig,
    Worker,
    can_take,
    check_exact,
    join,
    settle,
    until,
)
from tests.unit.kv_transfer.test_kv_faults import source as process_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.reshard import Span

pytestmark = pytest.mark.skipif(
    not copying.WORDS, reason="the extension was not built: no C compiler at install"
)
KEY, OTHER_KEY = CapabilityKey(b"k" * KEY_BYTES), CapabilityKey(b"o" * KEY_BYTES)
P, D = WorkerStart("p0", "source-instance"), WorkerStart("d0", "target-instance")


@pytest.fixture
def flips() -> Flips:
    """Of what comes to a target."""
    return Flips()


@pytest.fixture
def rig(clean: None, flips: Flips) -> Iterator[Rig]:
    made = Rig(lambda: FlippingTransport(ShmTransport(), flips))
    yield made
    made.close()


@pytest.fixture
def joined(rig: Rig) -> tuple[Worker, Worker]:
    """(source, target), between which nothing is under way."""
    source, target = rig.pair()
    join(source, target)
    return source, target


def taken(target: Worker) -> int:
    return target.half.counters.taken_blocks


def test_a_step_brings_what_lies_ready_and_its_source_is_told(
    joined: tuple[Worker, Worker],
) -> None:
    source, target = joined
    before = target.cache.blocks()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    # Nobody was waited for: it is there when the step has run.
    assert target.ended == ["d-t"]
    assert target.is_empty
    check_exact(source, target, before)
    arrival = target.arrivals["d-t"]
    assert arrival.token_ids == TOKENS
    report = arrival.report
    assert (report.blocks, report.bytes) == (4, 4 * geometry().block_bytes)
    assert (report.transport, report.digest_mismatches) == ("shm", 0)
    assert 0 < report.transfer_s <= report.exposed_s
    settle(source, target)
    assert (source.sent, target.failed) == (["p-t"], [])
    assert taken(target) == source.half.counters.pushed_blocks == 4
    assert source.half.counters.pushed_bytes == target.half.counters.received_bytes
    # Made when prefill ended, and with the copy.
    assert source.half.counters.digest_s > target.half.counters.digest_s == 0
    # It was given once.
    target.start(source, "t", TO, N)
    until(lambda: target.failures, source, target)
    assert target.failures == {"d-t": "finished"}


def test_a_part_of_it_is_taken_where_the_target_has_the_rest(
    joined: tuple[Worker, Worker],
) -> None:
    source, target = joined
    before = target.cache.blocks()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO[2:], N, first_block=2)
    assert target.arrivals["d-t"].report.blocks == 2
    before[TO[2]], before[TO[3]] = source.cache.block(FROM[2]), source.cache.block(FROM[3])
    assert target.cache.blocks() == before
    settle(source, target)
    assert source.sent == ["p-t"]


def test_without_digests_none_is_made(rig: Rig, flips: Flips) -> None:
    source, target = rig.pair(digest=DigestMode.OFF)
    join(source, target)
    source.prefill("t", FROM, N)
    flips.left = 1
    target.start(source, "t", TO, N)
    assert target.ended == ["d-t"]
    assert source.half.counters.digest_s == 0
    assert target.half.counters.digest_s == target.half.counters.digest_mismatches == 0
    settle(source, target)


@pytest.mark.parametrize(
    ("to", "tokens", "first", "reason"),
    [
        (TO, 18, 0, "4 blocks were granted where 5 are due"),
        (TO[:3], 14, 0, "3 blocks were granted where 4 are due"),
        (TO, 14, 1, "4 blocks were granted where 3 are due"),
        ([*TO, 18], 18, 0, "18 tokens were granted and 14 computed"),
        ([24, *TO[1:]], 14, 0, "a block id is outside its KV cache"),
    ],
)
def test_what_does_not_fit_is_not_taken_and_its_source_says_why(
    joined: tuple[Worker, Worker], to: list[int], tokens: int, first: int, reason: str
) -> None:
    source, target = joined
    before = target.cache.snapshot()
    source.prefill("t", FROM, N)
    target.start(source, "t", to, tokens, first_block=first)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert reason in target.failures["d-t"] or "the peer closed" in target.failures["d-t"]
    assert source.sent == ["p-t"]
    assert target.cache.snapshot() == before
    assert taken(target) == 0


def test_large_transfers_are_pushed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step must not copy for long."""
    monkeypatch.setattr(shm, "TAKEN_BYTES", 4 * geometry().block_bytes - 1)
    source, target = rig.pair()
    join(source, target)
    for name, to, tokens in (("large", TO, N), ("small", TO[:3], 12)):
        source.prefill(name, FROM[: len(to)], tokens)
        target.start(source, name, to, tokens)
        settle(source, target)
        assert f"d-{name}" in target.arrivals
    assert taken(target) == 3


def test_a_step_takes_so_much_and_is_granted_the_rest(
    joined: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STEP_BYTES", 2 * geometry().block_bytes)
    source, target = joined
    for i in range(4):
        source.prefill(f"t{i}", [5 + i], 4)
    where = (source.half.address,)
    starts = [
        TargetStart(f"t{i}", f"d-t{i}", where, source.instance_id, 0, 4, [9 + i]) for i in range(4)
    ]
    target.step(starts=starts)
    assert taken(target) == 2
    settle(source, target)
    assert sorted(target.arrivals) == [f"d-t{i}" for i in range(4)]
    assert [target.cache.block(9 + i) for i in range(4)] == [
        source.cache.block(5 + i) for i in range(4)
    ]
    assert taken(target) == 2


@pytest.mark.parametrize("who", ["source", "target"])
def test_without_the_extension_at_either_end_all_is_pushed(
    rig: Rig, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm if who == "source" else shm_target, "WORDS", False)
    source, target = rig.pair()
    for name in ("t", "u"):
        before = target.cache.blocks()
        source.prefill(name, FROM, N)
        target.start(source, name, TO, N)
        settle(source, target)
        check_exact(source, target, before)
    assert taken(target) == 0


def test_blocks_of_another_size_are_pushed(rig: Rig) -> None:
    source, target = rig.pair()
    join(source, target)
    with source.half.links.lock:
        source.half.links.sources.block_size = 2
    source.prefill("t", FROM, 8)
    target.start(source, "t", TO, 16)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert taken(target) == 0


def test_blocks_that_were_just_taken_away_are_not_written_by_a_step(
    joined: tuple[Worker, Worker],
) -> None:
    """A copy to somebody else may still read them. A grant waits for that."""
    source, target = joined
    before = target.cache.blocks()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N, preempted=["of somebody else"])
    settle(source, target)
    check_exact(source, target, before)
    assert taken(target) == 0


# -- what the source gives up meanwhile


def test_what_is_given_up_under_the_copy_is_thrown_away(
    joined: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source waits for nobody: it takes its blocks back, and writes other things into them."""
    source, target = joined
    copy = KvRegion.copy_from

    def slow(self: KvRegion, *arguments: Any) -> int:
        source.end_lease("t")
        source.collect()
        assert source.sent == ["p-t"]
        for block in FROM:
            source.cache.write(block, seed=99)
        return copy(self, *arguments)

    monkeypatch.setattr(KvRegion, "copy_from", slow)
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    settle(source, target)
    assert target.failures == {"d-t": "the lease ran out"}
    assert target.arrivals == {}
    assert source.half.links.sources.expired_leases == 1
    assert source.half.counters.pushed_blocks == taken(target) == 0


def test_a_target_that_dies_with_what_it_took_costs_its_source_a_lease_at_most(
    joined: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = joined
    monkeypatch.setattr(type(next(iter(target.half.links._all))), "hand_over", lambda self: None)
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    assert target.ended == ["d-t"]
    target.close()
    until(lambda: all(link.is_over for link in source.half.links._all), source)
    assert source.sent == []
    source.end_lease("t")
    until(lambda: source.is_empty, source)
    assert source.sent == ["p-t"]


def test_a_source_that_closes_takes_back_what_it_published(
    joined: tuple[Worker, Worker],
) -> None:
    source, target = joined
    (link,) = target.half.links._all
    assert link.takes is not None
    source.prefill("t", FROM, N)
    found = link.takes.find("t")
    assert found is not None
    source.transports[0].close()
    assert link.takes.take(found, FROM, TO) is None
    assert link.takes.find("t") is None
    source.step(released=["t"])
    assert source.sent == ["p-t"]


def test_the_sources_memory_stays_mapped_until_the_copy_has_returned(
    joined: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = joined
    inside, go_on, copied = threading.Event(), threading.Event(), []
    copy, unmap = KvRegion.copy_from, PeerMemory.close

    def held(self: KvRegion, *arguments: Any) -> int:
        inside.set()
        assert go_on.wait(WAIT_S)
        copied.append(True)
        return copy(self, *arguments)

    (link,) = target.half.links._all
    memory = getattr(link.target, "_memory")  # noqa: B009

    def noticed(self: PeerMemory) -> None:
        assert copied or self is not memory
        unmap(self)

    source.prefill("t", FROM, N)
    monkeypatch.setattr(KvRegion, "copy_from", held)
    monkeypatch.setattr(PeerMemory, "close", noticed)
    stepping = threading.Thread(target=target.start, args=[source, "t", TO, N])
    stepping.start()
    assert inside.wait(WAIT_S)
    link.close("broken by the test")
    link.join(0.05)
    assert not link.is_over
    go_on.set()
    stepping.join(WAIT_S)
    until(lambda: link.is_over, target)
    # It was there, whole and in time, whatever became of the link.
    assert target.arrivals.keys() == {"d-t"}
    source.end_lease("t")
    settle(source, target)
    assert source.sent == ["p-t"]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_source_need_not_run_for_it_and_one_that_died_is_not_asked(
    rig: Rig, how: signal.Signals
) -> None:
    target = rig.worker()
    want = Cache(geometry(), seed=zlib.crc32(source_process.EPOCH.encode()))
    with process_of("shm", "READY") as (process, address):
        instance_id = source_process.EPOCH
        target.start(address, "first", [0, 1], 8, instance_id=instance_id)
        until(lambda: target.ended and can_take(target, address, instance_id), target)
        process.send_signal(how)
        if how is signal.SIGKILL:
            until(lambda: all(link.is_down for link in target.half.links._all), target)
        target.start(address, "t", TO, N, instance_id=instance_id)
        if how is signal.SIGSTOP:
            assert target.ended == ["d-first", "d-t"]
            for old, new in zip(FROM, TO, strict=True):
                assert target.cache.block(new) == want.block(old)
        until(lambda: target.is_empty, target)
    assert target.failed == (["d-t"] if how is signal.SIGKILL else [])


# -- damage


def test_what_was_damaged_as_it_was_taken_is_taken_again(
    joined: tuple[Worker, Worker], flips: Flips
) -> None:
    source, target = joined
    before = target.cache.blocks()
    source.prefill("t", FROM, N)
    flips.read, flips.left = source.cache.region, 1
    target.start(source, "t", TO, N)
    assert flips.left == 0
    assert target.ended == ["d-t"]
    check_exact(source, target, before)
    assert target.arrivals["d-t"].report.digest_mismatches == 1
    assert target.half.counters.digest_mismatches == 1
    settle(source, target)
    assert taken(target) == 4
    assert source.sent == ["p-t"]


def test_damaged_again_it_fails_by_that_name(joined: tuple[Worker, Worker], flips: Flips) -> None:
    source, target = joined
    source.prefill("t", FROM, N)
    flips.read, flips.left = source.cache.region, 1000
    target.start(source, "t", TO, N)
    settle(source, target)
    assert target.codes == {"d-t": TransferCorrupted.code}
    assert target.half.counters.digest_mismatches == 2
    assert taken(target) == 0
    assert source.sent == ["p-t"]


@pytest.mark.parametrize("block", FROM)
def test_blocks_that_changed_since_prefill_ended_are_never_used(
    joined: tuple[Worker, Worker], block: int
) -> None:
    """A push would not find that: its digest would be of what lies there by then."""
    source, target = joined
    source.prefill("t", FROM, N)
    flip(source.cache.region, block, 8 * geometry().block_bytes - 1)
    target.start(source, "t", TO, N)
    settle(source, target)
    assert target.codes == {"d-t": TransferCorrupted.code}
    assert target.arrivals == {}
    assert source.half.counters.pushed_blocks == 0
    assert source.sent == ["p-t"]


def test_a_part_is_compared_with_what_lies_in_place(
    joined: tuple[Worker, Worker], flips: Flips
) -> None:
    """The digest is of all blocks together."""
    source, target = joined
    before = target.cache.blocks()
    source.prefill("t", FROM, N)
    flips.left = 1
    target.start(source, "t", TO[2:], N, first_block=2)
    assert target.arrivals["d-t"].report.digest_mismatches == 1
    before[TO[2]], before[TO[3]] = source.cache.block(FROM[2]), source.cache.block(FROM[3])
    assert target.cache.blocks() == before
    assert target.half.counters.digest_s > 0
    settle(source, target)
    assert source.sent == ["p-t"]


def test_what_is_given_up_while_its_digest_is_made_is_not_published(
    joined: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables' lock is free meanwhile."""
    source, target = joined
    (link,) = target.half.links._all
    assert link.takes is not None
    digest, looks = KvRegion.digest, list[object]()

    def slow(self: KvRegion, block_ids: list[int], tokens: Span | None = None) -> int:
        other = threading.Thread(target=lambda: source.end_lease("t"))
        other.start()
        other.join(WAIT_S)
        assert not other.is_alive()
        source.collect()
        looks.append(link.takes and link.takes.find("t"))
        return digest(self, block_ids, tokens)

    monkeypatch.setattr(KvRegion, "digest", slow)
    source.prefill("t", FROM, N)
    assert looks == [None]
    assert link.takes.find("t") is None
    assert source.sent == ["p-t"]


# -- rights


def right(**changed: Any) -> str:
    parts = {"key": KEY, "transfer_id": "t", "source": P, "target": D, "in_s": 3600, **changed}
    until_ = int(time.time()) + parts["in_s"]
    return mint(
        parts["key"], Capability(parts["transfer_id"], parts["source"], parts["target"], until_)
    )


@pytest.fixture
def guarded(rig: Rig) -> tuple[Worker, Worker]:
    """A source that asks for capabilities, and the target D."""
    source = rig.worker(instance_id=P.instance_id, kv_key=KEY, worker_id=P.worker_id)
    target = rig.worker(instance_id=D.instance_id, worker_id=D.worker_id)
    source.half.links._guard._key = None
    join(source, target)
    source.half.links._guard._key = KEY
    return source, target


WRONG = {
    "missing": "",
    "malformed": "2.3",
    "of another key": right(key=OTHER_KEY),
    "of another transfer": right(transfer_id="u"),
    "of an earlier source": right(source=WorkerStart("p0", "old")),
    "of another source": right(source=WorkerStart("p1", P.instance_id)),
    "of another target": right(target=WorkerStart("d1", D.instance_id)),
    "expired": right(in_s=-1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_without_the_right_nothing_is_taken_and_with_it_all(
    guarded: tuple[Worker, Worker], wrong: str
) -> None:
    source, target = guarded
    before = target.cache.snapshot()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N, capability=WRONG[wrong])
    until(lambda: target.failures, source, target)
    assert target.failures["d-t"].startswith("refused: ")
    assert target.cache.snapshot() == before
    assert source.half.counters.refused_capabilities == 1
    assert source.sent == []
    target.start(source, "t", TO, N, capability=right())
    settle(source, target)
    assert taken(target) == 4
    assert source.sent == ["p-t"]
    assert source.half.counters.refused_capabilities == 1


def test_who_says_that_it_took_what_it_had_no_right_to_frees_nothing(
    guarded: tuple[Worker, Worker],
) -> None:
    source, target = guarded
    source.prefill("t", FROM, N)
    (link,) = target.half.links._all
    for capability in ("", right(transfer_id="u")):
        link.send(Taken("t", 4, capability))
    link.hand_over()
    until(lambda: source.half.counters.refused_capabilities == 2, source, target)
    assert source.sent == []
    target.start(source, "t", TO, N, capability=right())
    assert target.ended == ["d-t"]
    settle(source, target)
