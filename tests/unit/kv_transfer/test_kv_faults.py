"""Peers that die, stand still or read nothing: blocks come back, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_transfer.messages import PROTOCOL_VERSION, Chunk, Grant, Hello, Welcome, encode
from tests.patience import WAIT_S
from tests.unit.kv_transfer import source_process
from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.rig import FROM, TO, N, Rig, Worker, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.kv_transfer.conftest import RigOf

ROOT = Path(__file__).resolve().parents[3]
WIDE = geometry(layers=4, blocks=16, page=1 << 20)  # 64 MiB: more than sockets hold


@contextlib.contextmanager
def source(transport: str, how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, address) of a source elsewhere; see source_process.py."""
    process = subprocess.Popen(
        [sys.executable, "-m", source_process.__name__, transport, how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, line_of(process)
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def received(target: Worker) -> int:
    return sum(share.received_blocks for share in target.half.links.targets)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_or_stops_half_way_fails_its_targets(
    rig_of: RigOf, transport: str, how: signal.Signals
) -> None:
    """A killed one is noticed by its socket, a stopped one by its silence."""
    target = rig_of(transport).worker()
    with source(transport, "HALF") as (process, address):
        target.start(address, "t", TO, N, instance_id=source_process.EPOCH)
        until(lambda: received(target) == 2, target)
        process.send_signal(how)
        if how is signal.SIGSTOP:
            target.give_up()
        until(lambda: target.is_empty, target)
    assert target.failed == ["d-t"]


@pytest.mark.parametrize("end", ["killed", "goes on"])
def test_blocks_stay_with_a_source_that_stands_inside_its_copy(rig_of: RigOf, end: str) -> None:
    """The link is long given up, and still the blocks are not the engine's: they may be written."""
    target = rig_of("shm").worker(cancel_timeout_s=0.05)
    with source("shm", "INSIDE") as (process, address):
        assert process.stdin is not None
        target.start(address, "t", TO, N, instance_id=source_process.EPOCH)
        assert line_of(process) == "inside"
        process.send_signal(signal.SIGSTOP)
        target.cancel("t")
        until(lambda: target.half.links._fencing, target)
        (link,) = target.half.links._fencing
        assert link.target is not None
        assert link.is_down
        for _ in range(5):
            assert not link.target.idle()
            target.collect()
        assert target.ended == []
        if end == "killed":
            process.kill()
        else:
            process.send_signal(signal.SIGCONT)
            process.stdin.write("go on\n")
            process.stdin.flush()
        until(lambda: target.is_empty, target)
        assert target.failures == {"d-t": "cancelled"}
        after = target.cache.snapshot()
        process.kill()
        process.wait(WAIT_S)
        assert target.cache.snapshot() == after


# -- peers that speak and do not read


class Mute:
    """A target that grants blocks over tcp and reads nothing but the handshake's answer."""

    def __init__(self, worker: Worker, blocks: int) -> None:
        host, _, port = worker.half.address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), WAIT_S)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        hello = Hello(PROTOCOL_VERSION, "mute", worker.instance_id, "same", [{"transport": "tcp"}])
        self.sock.sendall(encode(hello) + encode(Grant("t", 0, blocks * 4, list(range(blocks)))))


class FakeSource:
    """A source that the test plays byte by byte. Released by its `with`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"

    def __enter__(self) -> FakeSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.sock.close()

    def accept(self, target: Worker) -> None:
        """Takes the connection and agrees on tcp."""
        self.sock, _ = self._listener.accept()
        self.sock.sendall(encode(Welcome("fake", "tcp")))


def push_to_mute(worker: Worker) -> Mute:
    mute = Mute(worker, 16)
    until(lambda: len(worker.half.links.sources), worker)
    worker.expect("t")
    worker.compute("t", list(range(16)), 64)
    return mute


def push_that_is_stuck(worker: Worker) -> Mute:
    mute = push_to_mute(worker)
    until(lambda: worker.half.links.sources.copying_over("t"), worker)
    return mute


def test_a_target_that_reads_nothing_costs_its_link(tcp_rig: Rig) -> None:
    worker = tcp_rig.worker(shape=WIDE, send_timeout_s=0.2)
    mute = push_to_mute(worker)
    worker.finish("t")
    until(lambda: worker.is_empty, worker)
    assert worker.sent == ["p-t"]
    mute.sock.close()


def test_a_lease_ends_under_a_push_that_is_stuck_and_the_blocks_wait_for_it(tcp_rig: Rig) -> None:
    worker = tcp_rig.worker(shape=WIDE)
    mute = push_that_is_stuck(worker)
    worker.finish("t")
    worker.end_lease("t")
    worker.collect()
    assert worker.half.links.sources.expired_leases == 1
    assert worker.sent == []
    mute.sock.close()
    until(lambda: worker.is_empty, worker)
    assert worker.sent == ["p-t"]


def test_a_step_that_wants_blocks_back_closes_a_stuck_link(tcp_rig: Rig) -> None:
    """The engine must not stand still, nor end, because a decode worker does not read."""
    worker = tcp_rig.worker(shape=WIDE, preempt_timeout_s=0.05)
    mute = push_that_is_stuck(worker)
    worker.step(preempted=["t"])
    assert worker.half.links.sources.copying_over("t") == []
    worker.compute("t", list(range(16)), 64)
    worker.finish("t")
    assert worker.sent == ["p-t"]
    mute.sock.close()


def test_a_worker_closes_though_a_push_is_stuck(tcp_rig: Rig) -> None:
    worker = tcp_rig.worker(shape=WIDE)
    mute = push_that_is_stuck(worker)
    worker.close()
    assert worker.half.links.sources.copying_over("t") == []
    mute.sock.close()


def test_a_target_gives_up_a_source_that_stops_inside_a_chunk(tcp_rig: Rig) -> None:
    """Its own reader is in the middle of a block then; the blocks are free when it is out."""
    target = tcp_rig.worker()
    with FakeSource() as fake:
        target.start(fake.address, "t", TO, N, instance_id="fake")
        fake.accept(target)
        fake.sock.sendall(encode(Chunk("t", 0, 4, 4 * geometry().block_bytes)) + bytes(100))
        until(lambda: any(share.writing for share in target.half.links.targets), target)
        target.give_up()
        until(lambda: target.is_empty, target)
    assert target.failures == {"d-t": "no KV came in time"}


def test_a_worker_closes_while_strangers_knock(tcp_rig: Rig) -> None:
    worker = tcp_rig.worker()
    host, _, port = worker.half.address.rpartition(":")
    stop, knocking = threading.Event(), threading.Event()

    def knock() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), WAIT_S):
                knocking.set()

    strangers = [threading.Thread(target=knock) for _ in range(3)]
    for stranger in strangers:
        stranger.start()
    assert knocking.wait(WAIT_S)
    worker.close()
    stop.set()
    for stranger in strangers:
        stranger.join(WAIT_S)
    assert all(link.is_over for link in worker.half.links._all)


def test_an_accept_that_fails_does_not_end_the_listener(
    tcp_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    real = socket.socket.accept

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if not failed.is_set():
            failed.set()
            raise OSError(24, "Too many open files")
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    source, target = tcp_rig.pair()
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: target.arrivals, source, target)
    assert failed.is_set()
