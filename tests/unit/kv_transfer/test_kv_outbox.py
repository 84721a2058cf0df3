"""Whose turn it is to write: the order holds, and a visitor never waits for the peer."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from kv_transfer.memory import KvRegion
from kv_transfer.messages import Grant, encode
from kv_transfer.outbox import MAX_UNSENT_BYTES, Job, Outbox, Turn
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.rig import FROM, TO, N, Rig, check_exact, settle, until
from tests.unit.kv_transfer.test_kv_faults import Mute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.kv_transfer.conftest import RigOf

LIMIT = 100


class Peer:
    """A socket that takes `room` bytes at once, and the rest when `reads` is set."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.sends: list[bytes] = []
        self.room = 1 << 30
        self.reads = threading.Event()
        self.reads.set()

    def send_all(self, data: bytes) -> None:
        assert self.reads.wait(WAIT_S)
        self.sends.append(data)
        self.got += data

    def send_some(self, data: bytes) -> int:
        taken = data[: self.room]
        self.sends.append(taken)
        self.got += taken
        return len(taken)


@contextlib.contextmanager
def serving(peer: Peer) -> Iterator[Outbox]:
    """An outbox with its writer thread, which has found nothing to do."""
    outbox = Outbox(peer.send_all, peer.send_some)
    writer = threading.Thread(target=outbox.serve)
    writer.start()
    until(lambda: outbox._turn is Turn.NOBODY)
    yield outbox
    outbox.close()
    writer.join(WAIT_S)
    assert not writer.is_alive()


def say(outbox: Outbox, data: bytes, size: int = 0) -> Job:
    return Job(lambda: outbox.write(data), size)


def test_what_is_put_before_the_writer_lives_waits_for_it() -> None:
    peer = Peer()
    outbox = Outbox(peer.send_all, peer.send_some)
    outbox.put(say(outbox, b"a"))
    outbox.flush(LIMIT)
    assert not peer.got
    writer = threading.Thread(target=outbox.serve)
    writer.start()
    until(lambda: peer.got == b"a")
    outbox.close()
    writer.join(WAIT_S)


def test_a_visitor_writes_in_one_piece_what_moves_nothing() -> None:
    peer = Peer()
    with serving(peer) as outbox:
        for data in (b"a", b"b", b"c"):
            outbox.put(say(outbox, data))
        outbox.put_next(say(outbox, b"first"))
        outbox.flush(LIMIT)
        assert peer.sends == [b"firstabc"]


def test_a_chunk_finds_everything_before_it_sent_and_goes_with_what_follows() -> None:
    peer = Peer()
    with serving(peer) as outbox:
        for data, size in ((b"a", 0), (b"chunk", 10), (b"chunk", 10), (b"done", 0)):
            outbox.put(say(outbox, data, size))
        outbox.flush(LIMIT)
        assert peer.sends == [b"a", b"chunk", b"chunkdone"]


def test_much_that_waits_is_not_kept_back() -> None:
    peer = Peer()
    with serving(peer) as outbox:
        for _ in range(3):
            outbox.put(say(outbox, bytes(MAX_UNSENT_BYTES)))
        outbox.flush(LIMIT)
        assert [len(data) for data in peer.sends] == [MAX_UNSENT_BYTES] * 3


def test_what_is_over_the_limit_is_the_writers_and_all_behind_it() -> None:
    peer = Peer()
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())

    with serving(peer) as outbox:
        for size in (LIMIT - 1, 2, 0):
            outbox.put(Job(note, size))
        outbox.flush(LIMIT)
        until(lambda: len(threads) == 3)
        here = threading.get_ident()
        assert [thread == here for thread in threads] == [True, False, False]


@pytest.mark.parametrize("room", [0, 3])
def test_a_peer_that_reads_nothing_keeps_the_writer_and_no_visitor(room: int) -> None:
    peer = Peer()
    peer.room = room
    peer.reads.clear()
    with serving(peer) as outbox:
        for data in (b"hello", b"world"):
            outbox.put(say(outbox, data))
            outbox.flush(LIMIT)
        assert peer.got == b"hello"[:room]
        assert not outbox.has_visitor
        peer.reads.set()
        until(lambda: peer.got == b"helloworld")


def test_nothing_is_done_behind_a_job_that_failed() -> None:
    peer = Peer()

    def fail() -> None:
        raise OSError("broken by the test")

    with serving(peer) as outbox:
        outbox.put(Job(fail))
        outbox.put(say(outbox, b"behind"))
        with pytest.raises(OSError, match="broken"):
            outbox.flush(LIMIT)
        assert not outbox.has_visitor
        outbox.flush(LIMIT)
        outbox.wait_for_visitor()
        assert not peer.got


def test_the_end_waits_for_a_visitor() -> None:
    peer = Peer()
    inside, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(WAIT_S)
        assert not over.is_set()

    with serving(peer) as outbox:
        outbox.put(Job(hold))
        outbox.put(say(outbox, b"never"))
        visitor = threading.Thread(target=outbox.flush, args=[LIMIT])
        visitor.start()
        assert inside.wait(WAIT_S)
        outbox.close()

        def end() -> None:
            outbox.wait_for_visitor()
            over.set()

        ending = threading.Thread(target=end)
        ending.start()
        assert not over.wait(0.05)
        go_on.set()
        for thread in (visitor, ending):
            thread.join(WAIT_S)
        assert over.is_set()
        assert not peer.got


def test_the_order_holds_whoever_writes() -> None:
    """Visitors, the writer and a peer that takes now more, now less."""
    peer, rng = Peer(), random.Random(1)
    numbers, order = itertools.count(), threading.Lock()
    real = peer.send_some

    def now_and_then(data: bytes) -> int:
        peer.room = rng.choice([0, 1, 3, 1 << 20])
        return real(data)

    peer.send_some = now_and_then  # type: ignore[method-assign]
    with serving(peer) as outbox:

        def visit(seed: int) -> None:
            sizes = random.Random(seed)
            for _ in range(300):
                with order:
                    data = struct.pack("<I", next(numbers))
                    outbox.put(say(outbox, data, sizes.choice([0, 0, 1, 2 * LIMIT])))
                outbox.flush(LIMIT)

        visitors = [threading.Thread(target=visit, args=[seed]) for seed in range(4)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join(WAIT_S)
        until(lambda: len(peer.got) == 4 * 1200)
    assert list(struct.unpack("<1200I", peer.got)) == list(range(1200))


# -- on real links


def test_a_small_push_runs_on_the_thread_that_computed_it(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = rig_of("shm").pair()
    before = target.cache.blocks()
    threads: list[int] = []
    copy = KvRegion.copy_from

    def noted(self: KvRegion, *arguments: object) -> int:
        threads.append(threading.get_ident())
        return copy(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(KvRegion, "copy_from", noted)
    target.start(source, "t", TO, N)
    until(lambda: len(source.half.links.sources), source)
    (link,) = source.half.links._all
    until(lambda: link._outbox._turn is Turn.NOBODY, source)
    source.prefill("t", FROM, N)
    assert threads == [threading.get_ident()]
    settle(source, target)
    check_exact(source, target, before)


def test_a_step_goes_on_though_its_target_reads_nothing(tcp_rig: Rig) -> None:
    """More than the sockets hold, in pushes that are small enough for the step's own thread."""
    shape = geometry(layers=1, blocks=16, page=128 << 10)
    worker = tcp_rig.worker(shape=shape, lease_s=3600.0, send_timeout_s=600.0)
    mute = Mute(worker, 1)
    names = [f"t{i}" for i in range(256)]
    mute.sock.sendall(b"".join(encode(Grant(name, 0, 4, [0])) for name in names))
    until(lambda: len(worker.half.links.sources) == 1 + len(names), worker)
    for name in names:
        worker.prefill(name, [1], 4)
    assert 0 < worker.half.counters.pushed_blocks < len(names)
    worker.close()
    assert all(link.is_over for link in worker.half.links._all)
    mute.sock.close()


def test_what_is_handed_over_is_written_by_the_writer() -> None:
    peer, here = Peer(), threading.get_ident()
    with serving(peer) as outbox:
        threads = list[int]()
        outbox.put(Job(lambda: threads.append(threading.get_ident())))
        outbox.put(b"word")
        outbox.hand_over()
        until(lambda: bytes(peer.got) == b"word")
        assert threads
        assert threads != [here]
