"""Whoever connects without being a worker that fits is told why, or dropped, and hurts nobody."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.messages import (
    HEADER,
    MAX_HANDSHAKE_BYTES,
    PROTOCOL_VERSION,
    Ack,
    Alive,
    Cancel,
    Chunk,
    Done,
    Fail,
    Grant,
    Hello,
    Message,
    Refusal,
    Welcome,
    body_length,
    decode,
    encode,
)
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import geometry, turned
from tests.unit.kv_transfer.rig import BLOCK_SIZE, FROM, TO, N, Rig, Worker, settle, until

if TYPE_CHECKING:
    from collections.abc import Iterator

TCP = {"transport": "tcp"}


class Peer:
    """The other end of a connection, byte by byte."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(WAIT_S)

    @classmethod
    def to(cls, worker: Worker) -> Peer:
        host, _, port = worker.half.address.rpartition(":")
        return cls(socket.create_connection((host, int(port)), WAIT_S))

    def read(self) -> Message | None:
        """The next message; None where the connection has ended."""
        header = self._take(HEADER.size)
        return None if header is None else decode(self._take(body_length(header)) or b"")

    def _take(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                piece = self.sock.recv(count - len(data))
            except ConnectionResetError:
                return None
            if not piece:
                return None
            data += piece
        return data

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(encode(m) for m in messages))

    def close(self) -> None:
        self.sock.close()


def hello(worker: Worker, **changed: Any) -> Hello:
    fields = {
        "version": PROTOCOL_VERSION,
        "instance_id": "stranger",
        "producer_instance_id": worker.instance_id,
        "compatibility": "same",
        "offers": [TCP],
    }
    return Hello(**{**fields, **changed})


@pytest.fixture
def source(tcp_rig: Rig) -> Iterator[Worker]:
    """A source that a target which fits can still use when the test is over, and that counts who
    does not."""
    worker = tcp_rig.worker()
    yield worker
    worker.set_times(handshake_timeout_s=WAIT_S)
    until(lambda: all(link.is_over for link in worker.half.links._all), worker)
    target, dropped = tcp_rig.worker(), worker.half.counters.dropped_links
    target.start(worker, "after", TO, N)
    worker.prefill("after", FROM, N)
    settle(worker, target)
    assert target.arrivals.keys() == {"d-after"}
    target.close()
    until(lambda: all(link.is_over for link in worker.half.links._all), worker)
    assert worker.half.counters.dropped_links == dropped


def until_dropped(source: Worker, count: int = 1) -> None:
    """So many were ended and counted, and no more."""
    counters = source.half.counters
    until(lambda: counters.dropped_links >= count, source)
    until(lambda: all(link.is_over for link in source.half.links._all), source)
    assert counters.dropped_links == count
    assert source.half.links.snapshot().totals["dropped_links"] == count


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": PROTOCOL_VERSION + 1}, f"version {PROTOCOL_VERSION + 1}"),
        ({"version": 0}, "version 0"),
        ({"producer_instance_id": "an earlier life"}, "restarted"),
        ({"compatibility": "other"}, "KV layout other, not same"),
        ({"offers": []}, "no common transport"),
        ({"offers": [{"transport": "carrier pigeon"}]}, "no common transport"),
        ({"offers": [{"transport": ["tcp"]}, {"transport": None}, {}]}, "no common transport"),
    ],
)
def test_a_target_that_does_not_fit_is_told_why(
    source: Worker, changed: dict[str, Any], reason: str
) -> None:
    peer = Peer.to(source)
    peer.send(hello(source, **changed))
    answer = peer.read()
    assert isinstance(answer, Refusal)
    assert reason in answer.reason
    assert peer.read() is None
    peer.close()
    until_dropped(source)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/etc/passwd"},
        {"path": 7},
        {"size": "x"},
        {"size": -1},
        {"inode": None},
        {"slot": -1},
        {"slot": 2**64 - 1},
        {"geometry": 5},
        {"geometry": []},
        {"geometry": geometry(layers=2).to_list()},
        {"geometry": [2**60] * 6},
        {"block_size": "x"},
        {"block_size": -BLOCK_SIZE},
        {"block_size": BLOCK_SIZE + 1},
        {"block_size": 2**60},
        {"path": "/proc/1/fd/1"},
        {"boot_id": "elsewhere"},
    ],
)
def test_an_offer_of_memory_that_is_none_is_refused(rig_of: Any, change: dict[str, Any]) -> None:
    page = geometry().page_bytes
    worker = rig_of("shm").worker(order=turned(BLOCK_SIZE, page // BLOCK_SIZE))
    made = worker.transports[0].offer(worker.cache.local, 1)
    offer = {**made, **change}
    peer = Peer.to(worker)
    peer.send(hello(worker, offers=[offer]))
    answer = peer.read()
    assert isinstance(answer, Refusal)
    assert "shm" in answer.reason
    peer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(64),
        HEADER.pack(2**32 - 1),
        HEADER.pack(MAX_HANDSHAKE_BYTES + 1) + bytes(10),
        HEADER.pack(16) + b"\xc1" * 16,
        HEADER.pack(100) + b"short",
        encode(Welcome("e", "tcp")),
        encode(Grant("t", 0, 4, [1])),
    ],
)
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "leaves"])
def test_a_stranger_is_dropped(source: Worker, data: bytes, stays: bool) -> None:
    source.set_times(handshake_timeout_s=0.3)
    peer = Peer.to(source)
    peer.sock.sendall(data)
    until(lambda: source.half.links._all, source)
    if stays:
        assert peer.read() is None
    peer.close()
    until_dropped(source)


@pytest.mark.parametrize("length", [0, MAX_HANDSHAKE_BYTES + 1, 2**32 - 1])
def test_a_length_that_no_handshake_has_is_not_waited_for(tcp_rig: Rig, length: int) -> None:
    worker = tcp_rig.worker()
    peer = Peer.to(worker)
    peer.sock.sendall(HEADER.pack(length))
    assert peer.read() is None
    peer.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=300))
def test_no_bytes_hurt_a_source(source: Worker, data: bytes) -> None:
    peer = Peer.to(source)
    with contextlib.suppress(OSError):  # it may have been dropped by then
        peer.sock.sendall(data)
        peer.sock.shutdown(socket.SHUT_WR)
    assert peer.read() is None
    peer.close()


def test_a_stranger_that_sends_byte_after_byte_is_dropped(source: Worker) -> None:
    """Each byte comes in time; the handshake as a whole does not."""
    source.set_times(handshake_timeout_s=0.3)
    peer, pause = Peer.to(source), threading.Event()
    until(lambda: source.half.links._all, source)
    data = iter(HEADER.pack(MAX_HANDSHAKE_BYTES) + bytes(MAX_HANDSHAKE_BYTES))

    def dropped() -> bool:
        pause.wait(0.01)
        try:
            peer.sock.sendall(bytes([next(data)]))
        except OSError:
            return True
        return all(link.is_over for link in source.half.links._all)

    until(dropped)
    peer.close()
    until_dropped(source)


def test_of_many_who_say_nothing_the_oldest_goes(
    source: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest worker that comes last is served; those who are left end with the handshake."""
    monkeypatch.setattr("kv_transfer.guard.MAX_STRANGERS", 3)
    peers = [Peer.to(source) for _ in range(4)]
    assert peers[0].read() is None
    honest = Peer.to(source)
    honest.send(hello(source))
    assert isinstance(honest.read(), Welcome)
    assert peers[1].read() is None
    assert sum(link.is_stranger for link in source.half.links._all) == 2
    for peer in (*peers, honest):
        peer.close()
    until_dropped(source, 4)


@pytest.mark.parametrize(
    "message",
    [
        Done("t", [1], 0.0, 0.0),
        Chunk("t", 0, 1, geometry().block_bytes),
        Fail("t", "no"),
        Alive(["t"]),
        Welcome("e", "tcp"),
        Refusal("no"),
    ],
)
def test_a_target_that_speaks_out_of_its_part_is_dropped(source: Worker, message: Message) -> None:
    peer = Peer.to(source)
    peer.send(hello(source))
    assert isinstance(peer.read(), Welcome)
    peer.send(message)
    assert peer.read() is None
    peer.close()
    until_dropped(source)


def test_one_target_cannot_end_the_transfer_of_another(tcp_rig: Rig) -> None:
    source, target = tcp_rig.pair()
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM[:2], 8)
    until(lambda: source.half.counters.pushed_blocks == 2, source, target)
    peer = Peer.to(source)
    peer.send(hello(source), Cancel("t"), Ack("t"), Grant("t", 0, N, TO))
    assert isinstance(peer.read(), Welcome)
    assert peer.read() == Fail("t", "cancelled")
    assert peer.read() == Fail("t", "the transfer was granted before")
    source.compute("t", FROM, N)
    source.finish("t")
    settle(source, target)
    assert target.failed == []
    peer.close()


# -- a target's view: sources that are none


class FalseSource:
    """Where a target dials; the test answers. Released by `close`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self.peer: Peer | None = None

    def answer(self, data: bytes) -> None:
        """Takes the connection, reads the handshake and answers."""
        sock, _ = self._listener.accept()
        self.peer = Peer(sock)
        assert isinstance(self.peer.read(), Hello)
        self.peer.sock.sendall(data)

    def close(self) -> None:
        self._listener.close()
        if self.peer is not None:
            self.peer.close()


@pytest.fixture
def false_source() -> Iterator[FalseSource]:
    made = FalseSource()
    yield made
    made.close()


CHUNK_BYTES = geometry().block_bytes
UP = encode(Welcome("fake", "tcp"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(Refusal("because of the test")), "because of the test"),
        (encode(Welcome("another life", "tcp")), "restarted"),
        (encode(Welcome("fake", "shm")), "did not answer the handshake"),
        (encode(Done("t", [1], 0.0, 0.0)), "did not answer the handshake"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a message of"),
        (b"", "the handshake took too long|timed out"),
        (UP + encode(Refusal("late")), "no place here"),
        (UP + encode(Grant("t", 0, N, TO)), "no place here"),
        (UP + encode(Cancel("t")), "no place here"),
        (UP + b"\xff" * 8, "a message of"),
        (UP + encode(Chunk("t", 0, 2, CHUNK_BYTES)), "blocks are not"),
        (UP + encode(Chunk("t", 0, 2**62, CHUNK_BYTES)), "blocks are not"),
    ],
)
def test_a_target_fails_its_request_where_the_source_is_none(
    tcp_rig: Rig, false_source: FalseSource, data: bytes, reason: str
) -> None:
    target = tcp_rig.worker(handshake_timeout_s=WAIT_S if data else 0.3)
    before = target.cache.snapshot()
    target.start(false_source.address, "t", TO, N, instance_id="fake")
    false_source.answer(data)
    until(lambda: target.is_empty, target)
    assert target.failed == ["d-t"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(target.failures["d-t"])
    assert target.cache.snapshot() == before


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "nowhere.invalid:80", "x" * 80 + ":80", "127.0.0.1:99999", "a:b"]
)
def test_a_target_fails_its_request_where_nobody_listens(tcp_rig: Rig, address: str) -> None:
    target = tcp_rig.worker()
    target.start(address, "t", TO, N, instance_id="e")
    until(lambda: target.is_empty, target)
    assert target.failed == ["d-t"]
    assert target.failures["d-t"] not in ("", "closed")
    malformed = address.startswith(("x", "a"))
    assert ("is no address" in target.failures["d-t"]) == malformed


@pytest.mark.parametrize("which", ["instance_id", "compatibility"])
def test_workers_that_do_not_fit_are_told_so_through_their_requests(
    tcp_rig: Rig, which: str
) -> None:
    source = tcp_rig.worker(compatibility="other" if which == "compatibility" else "same")
    target = tcp_rig.worker()
    instance_id = "an earlier life" if which == "instance_id" else source.instance_id
    target.start(source, "t", TO, N, instance_id=instance_id)
    settle(source, target)
    assert ("restarted" if which == "instance_id" else "KV layout") in target.failures["d-t"]
