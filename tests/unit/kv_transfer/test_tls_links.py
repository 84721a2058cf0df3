"""KV that is encrypted on its way (`worker.kv.tls`), on real sockets: what a listener on the
network sees, who is refused, and what damage does. The other tests here also run over such
links."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.protocol import tls_stream
from kv_transfer.protocol.auth import LinkAuth
from kv_transfer.settings import ConnectorConfig
from kv_transfer.vllm.step import ConsumerStart
from pdserve.config import KvConfig, WorkerConfig, parse
from pdserve.errors import ConfigError, TransferFailed
from tests.support.kv_caches import geometry
from tests.support.kv_pair import (
    FROM,
    TO,
    TRANSPORTS,
    KvWorkers,
    N,
    check_exact,
    settle,
    tls_files,
    until,
)
from tests.support.pki import Ca

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.kv_pair import KvWorker

WIDE = geometry(page=32 << 10, layers=2)  # a page has several records


class Relay:
    """Passes connections on to `address`, and keeps what the producer sends. `change` gets the
    number of bytes before a piece, and the piece. Released by `close`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.seen = bytearray()
        self.change: Callable[[int, bytes], bytes] = lambda _, data: data
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._to)
                self._ends += ends
                for source, target in (ends, ends[::-1]):
                    is_producer = source is ends[1]
                    thread = threading.Thread(target=self._pass, args=(source, target, is_producer))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, is_producer: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_producer:
                    data = self.change(len(self.seen), data)
                    self.seen += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.fixture
def relay_to() -> Iterator[Callable[[KvWorker], Relay]]:
    relays: list[Relay] = []

    def make(worker: KvWorker) -> Relay:
        relays.append(Relay(worker.address))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()


def start(source: KvWorker, target: KvWorker, address: str, name: str = "t") -> None:
    blocks = {0: (0, TO)}
    start = ConsumerStart(name, f"d-{name}", (address,), source.instance_id, N, blocks)
    target.step(starts=[start])
    source.prefill(name, FROM, N)


def failure(source: KvWorker, target: KvWorker) -> str:
    """Return why a transfer between the two fails, of which nothing was sent."""
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: target.ended, target, source)
    assert target.codes == {"d-t": TransferFailed.code}
    assert not source.driver.counters.pushed_blocks
    return target.failures["d-t"]


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_a_listener_sees_kv_only_if_it_is_not_encrypted(
    encrypted: dict[str, Any],
    clean: None,
    relay_to: Callable[[KvWorker], Relay],
    is_encrypted: bool,
) -> None:
    workers = KvWorkers(TRANSPORTS["tcp"], **{**encrypted, "tls": is_encrypted})
    source, target = workers.pair(shape=WIDE)
    before, relay = target.cache.blocks(), relay_to(source)
    start(source, target, relay.address)
    settle(source, target)
    check_exact(source, target, before)
    pages = [page for block in FROM for page in source.cache.block(block)]
    assert len(relay.seen) > sum(map(len, pages))
    parts = [page[at : at + 16] for page in pages for at in range(0, len(page), 4096)]
    assert any(part in relay.seen for part in parts) is not is_encrypted
    # What follows the handshake, such as the messages with the tokens: a transfer's id.
    assert (b"transfer_id" in relay.seen) is not is_encrypted
    workers.close()


def test_a_damaged_record_ends_the_link_and_the_next_transfer_succeeds(
    tls_workers: KvWorkers, relay_to: Callable[[KvWorker], Relay]
) -> None:
    source, target = tls_workers.pair(shape=WIDE)
    before, relay = target.cache.blocks(), relay_to(source)

    def damage(at: int, data: bytes) -> bytes:
        if not at <= 50_000 < at + len(data):  # within the KV
            return data
        return data[: 50_000 - at] + bytes([data[50_000 - at] ^ 1]) + data[50_001 - at :]

    relay.change = damage
    start(source, target, relay.address)
    settle(source, target)
    assert target.failed == ["d-t"]
    assert "BAD_RECORD_MAC" in target.failures["d-t"].upper().replace(" ", "_")
    start(source, target, relay.address, "again")
    settle(source, target)
    assert "d-again" in target.arrivals
    check_exact(source, target, before)


@pytest.mark.parametrize("wants", ["source", "target"])
def test_a_pair_of_which_one_encrypts_is_refused(
    tls_workers: KvWorkers, encrypted: dict[str, Any], wants: str
) -> None:
    source = tls_workers.worker(tls=wants == "source")
    target = tls_workers.worker(tls=wants == "target")
    ours, theirs = ("true", "false") if wants == "source" else ("false", "true")
    reason = f"worker.kv.tls is {ours} at the producer and {theirs} at the consumer"
    assert failure(source, target) == reason


@pytest.mark.parametrize("plain", ["source", "target"])
def test_a_peer_without_tls_is_refused(tls_workers: KvWorkers, plain: str) -> None:
    none = {"tls": False, "tls_cert_file": "", "tls_key_file": "", "tls_ca_file": ""}
    source = tls_workers.worker(**(none if plain == "source" else {}))
    target = tls_workers.worker(**(none if plain == "target" else {}))
    assert "worker.access.tls" in failure(source, target)


@pytest.mark.parametrize("other", ["another CA", "another role"])
def test_a_peer_that_is_no_worker_of_our_ca_is_refused(
    tls_workers: KvWorkers, tmp_path: Path, other: str
) -> None:
    ca = Ca(tmp_path)
    ours = tls_workers.worker(**tls_files(ca))
    if other == "another CA":
        theirs = tls_workers.worker()
        assert "certificate verify failed" in failure(theirs, ours)
    else:
        theirs = tls_workers.worker(**tls_files(ca, "router"))
        assert failure(theirs, ours) == "the peer's certificate does not have the role worker"


def test_a_link_whose_keys_are_used_up_is_replaced(
    tls_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tls_workers.pair()
    monkeypatch.setattr(tls_stream, "_MAX_RECORDS", 0)
    for name in "tuv":
        target.start(source, name, TO, N)
        source.prefill(name, FROM, N)
        settle(source, target)
    assert target.arrivals.keys() == {"d-t", "d-u", "d-v"}
    made = {link.opened_at for link in target.links}
    until(lambda: len([x for x in target.links if not x.is_down]) == 1, source, target)
    assert max(made) in {x.opened_at for x in target.links if not x.is_down}


def test_what_a_full_socket_did_not_take_is_sent_once(encrypted: dict[str, Any]) -> None:
    auth = LinkAuth(parse(ConnectorConfig, encrypted))
    with ThreadPoolExecutor(1) as other_end:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            serving = other_end.submit(auth.secure, theirs, is_server=True)
            source, target = auth.secure(ours, is_server=False), serving.result()
            assert source is not None
            assert target is not None
            ours.settimeout(None)
            theirs.settimeout(None)
            sent, offered = b"", b""
            with contextlib.suppress(BlockingIOError):
                while True:
                    offered = bytes([len(sent) % 251]) * 1000
                    sent += offered[: source.send(offered, socket.MSG_DONTWAIT)]
            more = [memoryview(offered + b"behind"), memoryview(b" and behind")]
            total, found = len(sent) + sum(map(len, more)), bytearray()
            reading = other_end.submit(_read, target, total, found)
            rest = b"".join(more)
            while rest:
                rest = rest[source.sendmsg([memoryview(rest)]) :]
            reading.result()
            assert found == sent + offered + b"behind and behind"


def _read(stream: tls_stream.TlsStream, total: int, found: bytearray) -> None:
    view = memoryview(bytearray(4096))
    while len(found) < total:
        found += view[: stream.recv_into(view)]


TLS = {"cert_file": "c", "key_file": "k", "ca_file": "a"}


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (WorkerConfig, {"kv": {"tls": True}}, "kv.tls"),
        (
            WorkerConfig,
            {"kv": {"tls": True}, "access": {"tls": {**TLS, "require_client_cert": False}}},
            "kv.tls",
        ),
        (KvConfig, {"tls": True, "transports": ["nccl"]}, "transports"),
        (KvConfig, {"tls": True, "transports": ["nixl"]}, "transports"),
        (ConnectorConfig, {"tls": True}, "tls"),
    ],
)
def test_a_configuration_that_could_not_encrypt_is_refused(
    kind: type[Any], values: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as e:
        parse(kind, values)
    assert e.value.field == field


def test_auto_offers_no_transport_that_cannot_encrypt() -> None:
    made = ConnectorConfig(tls=True, tls_cert_file="c", tls_key_file="k", tls_ca_file="a")
    assert made.names(on_gpu=True) == ("cuda_ipc",)
    assert made.names(on_gpu=False) == ("shm", "tcp")
    assert made.shared_by_peers != ConnectorConfig().shared_by_peers  # routers do not pair the two
