"""Memory that one process hands to another: who may get it, through which directory, and what
follows if that fails."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from kv_transfer import transport
from kv_transfer.cache.host_memory import SharedMemory
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol import handshake
from kv_transfer.protocol.snapshot import KvState
from kv_transfer.settings import ConnectorConfig
from kv_transfer.transport.descriptors import Descriptors
from pdserve.errors import ConfigError
from pdserve.types import KvLedger
from tests.support.kv_caches import HostCache, geometry
from tests.support.kv_pair import (
    FROM,
    TO,
    TRANSPORTS,
    KvWorker,
    KvWorkers,
    N,
    check_exact,
    transfer,
    until,
)
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory("test-kv")
    made.grow(4096)
    yield made
    made.close()


@pytest.fixture
def make(tmp_path: Path, memory: SharedMemory, clean: None) -> Iterator[Callable[..., Descriptors]]:
    made: list[Descriptors] = []

    def make(**settings: str) -> Descriptors:
        made.append(Descriptors(ConnectorConfig(shared_dir=str(tmp_path), **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.close()
    assert not [*tmp_path.glob("pdserve-kv-*/*")]


def test_the_descriptor_leads_to_the_memory_and_cannot_be_written(
    make: Callable[..., Descriptors], memory: SharedMemory
) -> None:
    producer = make()
    producer.share(memory.path)
    producer.share(memory.path)
    fd = make().fetch(producer.name, producer.key)
    os.pwrite(memory.fd, b"here", 100)
    assert os.pread(fd, 4, 100) == b"here"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"no", 0)
    os.close(fd)


def test_a_process_without_the_key_or_the_token_gets_nothing(
    make: Callable[..., Descriptors], memory: SharedMemory, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s" * 40)
    producer = make(token_file=str(tmp_path / "token"))
    producer.share(memory.path)
    for other, key in ((make(token_file=str(tmp_path / "token")), b"x" * 16), (make(), b"")):
        with pytest.raises(KvTransferError, match="does not share"):
            other.fetch(producer.name, key or producer.key)
    with pytest.raises(KvTransferError, match="is not the name of a socket"):
        producer.fetch(f"../{producer.name}", producer.key)
    with pytest.raises(KvTransferError, match=r"must mount one directory.*worker\.kv\.shared_dir"):
        producer.fetch("0123456789abcdef.sock", producer.key)
    assert (producer.directory / producer.name).is_socket()
    assert producer.directory.stat().st_mode & 0o777 == 0o700


def test_the_socket_of_a_killed_process_is_removed(
    make: Callable[..., Descriptors], memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, later = make(), make()
    alive.share(memory.path)
    dead = later.directory / "0123456789abcdef.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        monkeypatch.chdir(dead.parent)  # the whole path may be too long for a socket
        sock.bind(dead.name)
    later.share(memory.path)
    assert not dead.exists()
    os.close(later.fetch(alive.name, alive.key))


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.shared_dir: .*none is not a directory"):
        transport.make(ConnectorConfig(shared_dir=str(tmp_path / "none")))
    settings = ConnectorConfig(shared_dir=str(tmp_path))
    private = Descriptors(settings).directory
    private.chmod(0o755)
    with pytest.raises(KvTransferError, match="not a directory that only we may enter"):
        Descriptors(settings)


def test_a_directory_with_a_long_name_serves_too(tmp_path: Path, memory: SharedMemory) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    settings = ConnectorConfig(shared_dir=str(deep))
    producer, consumer = Descriptors(settings), Descriptors(settings)
    producer.share(memory.path)
    os.close(consumer.fetch(producer.name, producer.key))
    producer.close()


# -- which transport two workers get


def transports(settings: ConnectorConfig) -> list[object]:
    return [TRANSPORTS[name](settings) for name in ("shm", "tcp")]


def two_workers(kv_workers: KvWorkers, *directories: Path) -> tuple[KvWorker, KvWorker]:
    """Return (producer, consumer) that may use shm and tcp, each with its directory."""
    made = []
    for directory in directories:
        directory.mkdir(exist_ok=True)
        path = str(directory)
        both = transports(ConnectorConfig(shared_dir=path))
        made.append(kv_workers.worker(transports=both, shared_dir=path))
    return made[0], made[1]


def test_workers_of_one_host_without_a_common_directory_say_that_they_use_tcp(
    shm_rig: KvWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = two_workers(shm_rig, tmp_path / "one", tmp_path / "other")
    before = target.cache.blocks()
    transfer(source, target)
    check_exact(source, target, before)
    view = target.look()
    report = KvState(KvLedger(), (view,)).report()
    reason = report.downgrades[source.instance_id]
    assert reason.startswith(
        "tcp; not shm: cannot map the producer's memory: the producer's socket"
    )
    assert (report.links, view.totals["downgrades"]) == ({"tcp": 1}, 1)
    assert f"worker {target.instance_id} gets KV from {source.instance_id} over tcp" in caplog.text
    assert source.look().totals["downgrades"] == 0


@pytest.mark.parametrize("names", [("auto",), ("shm", "tcp")])
def test_between_hosts_tcp_is_a_downgrade_only_if_shm_was_asked_for(
    shm_rig: KvWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    source, target = two_workers(shm_rig, tmp_path, tmp_path)
    target.peers._handshake._settings = structs.replace(target.settings, transports=names)
    hosts = iter(["one", "other"])
    monkeypatch.setattr(handshake, "boot_id", lambda: next(hosts))
    transfer(source, target)
    (link,) = target.look().links
    assert link.transport == "tcp"
    asked = "tcp; not shm: the workers run on different hosts"
    assert link.downgrade == ("" if names == ("auto",) else asked)


# -- two containers

PRODUCER = "producer"


def test_a_worker_in_another_pid_namespace_maps_the_memory(
    shm_rig: KvWorkers, tmp_path: Path
) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if refused := tried.stderr:
        pytest.skip(f"no namespaces: {refused.strip()}")
    shared, here = str(tmp_path), Path(__file__)
    with subprocess.Popen(
        [*apart, sys.executable, "-m", f"tests.unit.kv_transfer.{here.stem}", shared],
        cwd=here.parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid, address = process.stdout.readline().split()
        assert int(pid) < process.pid  # it counts from 1
        both = transports(ConnectorConfig(shared_dir=shared))
        target = shm_rig.worker(transports=both, shared_dir=shared)
        source = Remote(address)
        target.start(source, "t", TO, N)  # type: ignore[arg-type]
        until(lambda: target.ended, target)
        assert target.look().links[0].transport == "shm"
        same = HostCache(geometry(), seed=zlib.crc32(PRODUCER.encode()))
        assert [target.cache.block(b) for b in TO] == [same.block(b) for b in FROM]
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


@dataclasses.dataclass
class Remote:
    """Start a worker in another process."""

    address: str
    instance_id: str = PRODUCER


def run_producer(shared_dir: str) -> None:
    """Run a worker that has computed one prompt until standard input ends."""
    kv_workers = KvWorkers(TRANSPORTS["shm"])
    worker = kv_workers.worker(instance_id=PRODUCER, shared_dir=shared_dir)
    worker.prefill("t", FROM, N)
    sys.stdout.write(f"{os.getpid()} {worker.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    kv_workers.close()


if __name__ == "__main__":
    run_producer(sys.argv[1])
