"""Links between workers: who is let in, what is damaged on the way, and what a link's end does."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kv_transfer.cache.geometry import KvGroup
from kv_transfer.cache.gpu_memory import DeviceRegion, device_region
from kv_transfer.errors import LinkClosed
from kv_transfer.protocol.message_stream import MessageStream
from kv_transfer.protocol.messages import (
    HEADER,
    PROTOCOL_VERSION,
    Ack,
    Hello,
    RefuseHandshake,
    decode,
    encode,
)
from kv_transfer.protocol.peers import Peers
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.transport import LocalKv, Transport
from kv_transfer.settings import MAX_IN_FLIGHT, ConnectorConfig
from kv_transfer.transport.mapped import MappedProducer
from kv_transfer.transport.tcp import TcpProducer
from pdserve.errors import TransferCorrupted
from tests.support.kv_caches import geometry
from tests.support.kv_pair import (
    FROM,
    TO,
    KvWorkers,
    N,
    check_exact,
    settle,
    tls_files,
    transfer,
    until,
)
from tests.support.pki import Ca
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.messages import ChunkReady
    from tests.support.kv_pair import KvWorker


def failure(source: KvWorker, target: KvWorker) -> str:
    """Return why a transfer between the two fails."""
    target.start(source, "t", TO, N)
    until(lambda: target.ended, target, source)
    return target.failures["d-t"]


# -- damage


class Damage:
    """Sends `count` chunks, after the first `after`, with another block than their first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, after: int = 0) -> None:
        self.left, self.after = count, after
        for producer in (MappedProducer, TcpProducer):
            monkeypatch.setattr(producer, "send", self._send(producer.send))

    def _send(self, real: Any) -> Any:
        def send(channel: Any, chunk: ChunkReady, block_ids: list[int], part: Any) -> Any:
            if self.after:
                self.after -= 1
            elif self.left:
                self.left -= 1
                block_ids = [0, *block_ids[1:]]
            return real(channel, chunk, block_ids, part)

        return send


def test_every_block_in_host_memory_has_a_digest_although_a_gpu_would_sample(
    kv_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = kv_workers.pair(chunk_bytes=geometry().block_bytes, digest_one_in=1024)
    before = target.cache.blocks()
    Damage(monkeypatch, 1, after=1)
    transfer(source, target)
    check_exact(source, target, before)
    assert target.arrivals["d-t"].report.digest_mismatches == 1


def test_a_damaged_chunk_is_sent_again_once(
    kv_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = kv_workers.pair(chunk_bytes=geometry().block_bytes)
    before = target.cache.blocks()
    Damage(monkeypatch, 1)
    transfer(source, target)
    check_exact(source, target, before)
    assert target.arrivals["d-t"].report.digest_mismatches == 1
    assert target.look().totals["digest_mismatches"] == 1


def test_damage_twice_fails_the_transfer_by_its_own_code(
    kv_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = kv_workers.pair()
    Damage(monkeypatch, 2)
    transfer(source, target)
    assert target.failures == {
        "d-t": "KV digest mismatch in blocks 0-0, also after one retry",
    }
    assert target.codes == {"d-t": TransferCorrupted.code}
    assert source.sent == ["p-t"]


def test_digests_are_made_ahead_and_blocks_that_change_after_them_are_not_accepted(
    kv_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = kv_workers.pair()
    source.prefill("t", FROM, N)
    (sending,) = source.driver.producer
    until(lambda: [each.end for each in sending.digests.values()] == [len(FROM)], source)
    monkeypatch.setattr(source.cache.region, "digests", lambda ids: pytest.fail("made twice"))
    source.cache.write(FROM[1], seed=77)
    target.start(source, "t", TO, N)
    settle(source, target)
    assert target.codes == {"d-t": TransferCorrupted.code}


def test_blocks_that_are_given_up_during_the_copy_are_not_accepted_without_their_digests(
    shm_rig: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = shm_rig.pair()
    target.driver.consumer.digest_one_in = len(FROM)  # as on a GPU: the first block only
    inside, go_on, real = threading.Event(), threading.Event(), target.cache.region.begin_copy

    def stop(*args: Any) -> BlockCopy:
        inside.set()
        go_on.wait(WAIT_S)
        return real(*args)

    monkeypatch.setattr(target.cache.region, "begin_copy", stop)
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    (sending,) = source.driver.producer
    until(lambda: inside.is_set() and sending.state == "sent", source)
    source.step(released=["t"])
    until(lambda: not any(x.has_items or x.stream.writing.locked() for x in source.links), source)
    assert source.sent == ["p-t"]
    source.cache.write(FROM[1], seed=77)
    go_on.set()
    settle(source, target)
    assert target.failures == {"d-t": "the request was cancelled"}


# -- who is let in


def test_a_producer_that_was_restarted_refuses(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.pair()
    source.instance_id, old = "another", source.instance_id
    assert failure(source, target) == "the producer has been restarted"
    source.instance_id = old


def test_another_layout_is_refused_by_name(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.worker(), kv_workers.worker(compatibility="other")
    assert failure(source, target) == "KV layout other, not same"


def test_another_version_is_refused_by_name(tcp_workers: KvWorkers) -> None:
    source = tcp_workers.worker()

    hello = Hello(PROTOCOL_VERSION + 1, "x", source.instance_id, "same", ["tcp"], b"")
    host, _, port = source.address.rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(encode(hello))
        answer = decode(peer.recv(1 << 16)[HEADER.size :])
    assert answer == RefuseHandshake(
        f"protocol version {PROTOCOL_VERSION + 1}, not {PROTOCOL_VERSION}"
    )


def test_without_a_common_transport_the_reason_is_said(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.worker(), kv_workers.worker(transports=[])
    assert failure(source, target) == (
        "no common transport: shm: this worker cannot use it; tcp: this worker cannot use it"
    )


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(0), encode(Ack("t")), HEADER.pack(1 << 30), b""],
)
def test_a_stranger_is_dropped_and_counted(tcp_workers: KvWorkers, data: bytes) -> None:
    source, target = tcp_workers.pair()
    host, _, port = source.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        until(lambda: source.driver.counters.dropped_links == 1, source)
        assert stranger.recv(1) == b""
    transfer(source, target)
    assert target.arrivals.keys() == {"d-t"}


def test_a_silent_stranger_is_dropped_in_time(tcp_workers: KvWorkers) -> None:
    source = tcp_workers.worker(handshake_timeout_s=0.05)
    host, _, port = source.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        until(lambda: source.driver.counters.dropped_links == 1, source)


def test_the_oldest_of_too_many_strangers_is_dropped(tcp_workers: KvWorkers) -> None:
    source = tcp_workers.worker(max_unfinished=2)
    host, _, port = source.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
    until(lambda: source.driver.counters.dropped_links == 1, source)
    assert strangers[0].recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_no_more_links_than_a_worker_has_threads_for(tcp_workers: KvWorkers) -> None:
    source, target = tcp_workers.pair(max_links=1)
    before = target.cache.blocks()
    transfer(source, target)
    check_exact(source, target, before)
    assert "1 links are open" in failure(source, tcp_workers.worker())
    transfer(source, target, "t2")


def token_file(path: Path, text: str) -> str:
    path.write_text(text, encoding="ascii")
    return str(path)


@pytest.mark.parametrize("old_is_at", ["source", "target", "both"])
def test_workers_with_one_common_token_exchange_kv(
    kv_workers: KvWorkers, tmp_path: Path, old_is_at: str
) -> None:
    old = token_file(tmp_path / "old", "s" * 40)
    both = token_file(tmp_path / "both", f"{'n' * 40}\n{'s' * 40}\n")
    source, target = (
        kv_workers.worker(token_file=old if old_is_at in (who, "both") else both)
        for who in ("source", "target")
    )
    before = target.cache.blocks()
    transfer(source, target)
    check_exact(source, target, before)


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("other", ["x" * 40, None])
def test_a_worker_without_the_token_gets_no_kv(
    kv_workers: KvWorkers, tmp_path: Path, who: str, other: str | None
) -> None:
    good = {"token_file": token_file(tmp_path / "good", "s" * 40)}
    bad = {"token_file": token_file(tmp_path / "bad", other)} if other else {}
    source = kv_workers.worker(**(bad if who == "source" else good))
    target = kv_workers.worker(**(bad if who == "target" else good))
    before = target.cache.snapshot()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    until(lambda: target.ended, target, source)
    assert target.failed == ["d-t"]
    assert target.cache.snapshot() == before
    assert not source.driver.counters.pushed_blocks


# -- the end of a link


def test_an_unread_socket_ends_the_link(tcp_workers: KvWorkers) -> None:
    """A stopped consumer loses its transfer and does not block the producer's thread."""
    big = geometry(page=1 << 20, layers=4)
    source = tcp_workers.worker(shape=big, send_timeout_s=0.1)
    target = tcp_workers.worker(shape=big)
    go_on = threading.Event()
    real = target.cache.region.digests

    def hold(ids: list[int]) -> bytes:
        go_on.wait(WAIT_S)
        return real(ids)

    target.cache.region.digests = hold  # type: ignore[method-assign]
    for name in ("t", "u"):
        target.start(source, name, TO if name == "t" else [0, 1, 2, 5], N)
        source.prefill(name, FROM, N)
    until(lambda: len(source.sent) == 2, source)
    go_on.set()
    until(lambda: target.is_empty, target)
    assert "d-u" in target.failed


def test_preempted_blocks_are_waited_for(
    tcp_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that frees blocks waits until no copy reads them."""
    source, target = tcp_workers.pair(preempt_timeout_s=0.05)
    inside = threading.Event()
    real = TcpProducer.send

    def slow(self: TcpProducer, *chunk: Any) -> Any:
        inside.set()
        until(lambda: all(link.is_down for link in source.links))
        return real(self, *chunk)

    monkeypatch.setattr(TcpProducer, "send", slow)
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM, N)
    assert inside.wait(WAIT_S)
    source.step(preempted=["t"])
    until(lambda: target.ended, target, source)
    assert target.failed == ["d-t"]


def test_blocks_are_not_written_again_before_a_consumer_that_copies_is_sent_the_end(
    shm_rig: KvWorkers,
) -> None:
    """With few digests, nothing else tells it that its last copy may be wrong."""
    source, target = shm_rig.pair()
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM, N - 1)
    until(lambda: source.look().transfers[0].transport, source)
    (link,) = source.links
    with link.stream.writing:
        source.finish("t")
        source.collect()
        assert source.sent == []
    until(lambda: source.sent and target.ended, source, target)
    assert source.sent == ["p-t"]
    assert "tokens were subscribed" in target.failures["d-t"]


def test_transports_are_prepared_before_the_engine_steps(
    shm_rig: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[object] = []
    monkeypatch.setattr(Transport, "prepare", lambda self, local: prepared.append((self, local)))
    worker = shm_rig.worker()
    assert prepared == [(worker.transports[0], worker.cache.local)]


class Held:
    """A chunk that is being sent until the test lets go."""

    has_ended = False

    def __init__(self, let_go: threading.Event, error: Exception | None = None) -> None:
        self._let_go, self._error = let_go, error

    def wait(self) -> bytes:
        assert self._let_go.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return b""


def hold_sends(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> tuple[list[int], threading.Event]:
    """Return the first blocks of the chunks that are begun, and what lets them end."""
    begun: list[int] = []
    let_go = threading.Event()
    real = TcpProducer.send

    def send(self: TcpProducer, chunk: ChunkReady, block_ids: list[int], part: Any) -> Held:
        real(self, chunk, block_ids, part)
        begun.append(chunk.first)
        return Held(let_go, error)

    monkeypatch.setattr(TcpProducer, "send", send)
    return begun, let_go


def test_chunks_are_sent_together_and_the_transfer_ends_with_the_last(
    tcp_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go = hold_sends(monkeypatch)
    source, target = tcp_workers.pair(chunk_bytes=geometry().block_bytes)
    before = target.cache.blocks()
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: len(begun) == min(MAX_IN_FLIGHT, len(FROM)), target, source)
    assert begun == list(range(len(begun)))
    assert source.look().totals["pushed_blocks"] == 0
    let_go.set()
    settle(source, target)
    check_exact(source, target, before)
    assert begun == list(range(len(FROM)))
    assert source.look().totals["pushed_blocks"] == len(FROM)


def test_a_link_that_fails_ends_all_that_it_sends(
    tcp_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets its blocks back."""
    begun, let_go = hold_sends(monkeypatch, ConnectionAbortedError("the link breaks"))
    source, target = tcp_workers.pair(chunk_bytes=geometry().block_bytes)
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: len(begun) == min(MAX_IN_FLIGHT, len(FROM)), target, source)
    let_go.set()
    until(lambda: target.ended and source.is_empty, target, source)
    assert target.failed == ["d-t"]
    assert source.look().totals["pushed_blocks"] == 0


def test_preparations_of_a_transport_precede_the_first_chunk(
    kv_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request of a pair does not wait for the allocation."""
    done: list[str] = []
    for producer in (MappedProducer, TcpProducer):
        send = producer.send
        monkeypatch.setattr(producer, "open", lambda self: done.append("open"))
        monkeypatch.setattr(
            producer,
            "send",
            lambda *args, send=send: (done.append("send"), send(*args))[1],  # type: ignore[misc]
        )
    source, target = kv_workers.pair()
    target.start(source, "t", TO, N)
    until(lambda: done, target, source)
    source.prefill("t", FROM, N)
    settle(source, target)
    assert done == ["open", "send"]


def test_kernels_are_used_once_before_a_cache_on_a_gpu_is_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their first use loads them and may wait for the whole GPU."""
    copied: list[int] = []
    monkeypatch.setattr(DeviceRegion, "copy_from", lambda *args: copied.append(len(args[-1])))
    region = device_region([torch.zeros(4, 2, 4, 8)], 4)
    Peers(
        ConnectorConfig(),
        "instance",
        [],
        local=LocalKv({0: region}, None),
        compatibility="same",
        plan=CopyPlan((Shard(2, 128, KvGroup(0, 4), (1,)),)),
    ).close()
    assert copied == [1, 4]


def test_a_silent_producer_fails_the_transfer(kv_workers: KvWorkers) -> None:
    source, target = kv_workers.worker(), kv_workers.worker(receive_timeout_s=0.05)
    source.expect("t")
    target.start(source, "t", TO, N)
    until(lambda: target.ended, target)
    assert target.failures == {"d-t": "no KV received for 0.05 s"}
    assert target.look().totals["receive_timeouts"] == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_producer_that_stops_inside_a_chunk_does_not_keep_the_blocks(
    tcp_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    source, target = tcp_workers.pair()
    inside, go_on = threading.Event(), threading.Event()
    real = MessageStream.write_pieces

    def stop(stream: MessageStream, pieces: Sequence[memoryview]) -> None:
        real(stream, pieces[:2])
        if pieces[2:]:
            inside.set()
            go_on.wait()
            raise LinkClosed("the producer goes on too late")

    monkeypatch.setattr(MessageStream, "write_pieces", stop)
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    assert inside.wait(WAIT_S)
    target.driver.consumer.receive_timeout_s = 0.05  # sooner, it might end before the chunk begins
    try:
        if is_cancelled:
            target.cancel("t")
        until(lambda: target.failed == ["d-t"], target)
    finally:
        go_on.set()


def test_links_are_made_with_certificates_that_were_renewed(
    kv_workers: KvWorkers, tmp_path: Path
) -> None:
    ca = Ca(tmp_path)
    running = kv_workers.worker(**tls_files(ca))
    ca = Ca(tmp_path)  # at the same path: nobody who has read these files trusts the former one
    started = kv_workers.worker(**tls_files(ca))
    for source, target in ((running, started), (started, running)):
        before = target.cache.blocks()
        transfer(source, target)
        check_exact(source, target, before)


def test_mutual_tls_lets_workers_in_and_others_not(kv_workers: KvWorkers, tmp_path: Path) -> None:
    ca = Ca(tmp_path)

    own = tls_files(ca)
    source, target = kv_workers.pair(**own)
    before = target.cache.blocks()
    transfer(source, target)
    check_exact(source, target, before)
    router = kv_workers.worker(**tls_files(ca, "router"))
    plain = kv_workers.worker(handshake_timeout_s=1.0)
    for intruder in (router, plain):
        intruder.start(source, "x", TO, N)
        until(lambda worker=intruder: worker.ended, intruder, source)  # type: ignore[misc]
        assert intruder.failed == ["d-x"]
