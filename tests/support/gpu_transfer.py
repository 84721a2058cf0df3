"""KV between two processes on one GPU. Run by test_single_gpu.py: ROLE TRANSPORT [PORT].

Role `consumer`: start a producer, receive twice, and print `exact` if every block is equal. Role
`kill`: first kill a producer in the middle of a chunk, then do the same. Role `producer`: that
child.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kv_transfer import transport
from kv_transfer.cache.geometry import PagePart
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.messages import ChunkReady, Inner, TransferDone
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import read_extra_config
from kv_transfer.transport.nccl import transport as nccl
from tests.support.fake_nccl import FakeLink
from tests.support.gpu_caches import BLOCKS, is_shim, on_gpu, random_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.cache.gpu_memory import DeviceRegion

# Chunks of 84 MB, or 21 MB where the CPU copies them: both are sent in several parts.
LAYERS = 8 if is_shim() else 32
LAYOUT = os.environ.get("GPU_TEST_LAYOUT", "LBNHC")
FROM = [(7 * n + 3) % BLOCKS for n in range(40)]
# What writes to the consumer's blocks: through staging, and from block to block.
WRITERS = ("scatter", "_copy_runs")
TO = [(11 * n + 5) % BLOCKS for n in range(40)]


def made(name: str, seed: int) -> tuple[torch.Tensor, DeviceRegion, Any]:
    view, region = on_gpu(random_cache(seed, layers=LAYERS), LAYOUT)
    return view, region, transport.make(read_extra_config({"transports": (name,)}))[0]


def say(link: Any, value: dict[str, Any]) -> None:
    link.post(Inner(msgspec.msgpack.encode(value)))


def heard(link: Any) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.msgpack.decode(link.read().body)
    return value


def producer(name: str, port: int) -> None:
    _, region, made_transport = made(name, 1)
    local = LocalKv({0: region}, None)
    link: Any = FakeLink(socket.create_connection(("127.0.0.1", port)))
    say(link, made_transport.offer(local))
    end = made_transport.producer(local, heard(link), link)

    def read() -> None:
        try:
            while isinstance(message := link.read(), Inner):
                end.on_inner(message.body)
        except (KvTransferError, OSError):
            link.close()

    threading.Thread(target=read, daemon=True).start()
    end.open()
    size = region.size_bytes(len(FROM))
    for _ in range(2):
        sent = end.send(
            ChunkReady("t", 0, len(FROM), size),
            FROM,
            PagePart(0, 0, 0, region.geometry.page_bytes, 0, 0, LAYERS),
        )
        sent.wait()
        link.write(TransferDone("t", [1], region.digests(FROM), 0.0, 0.0))
    while not link.is_down:  # until the consumer closes
        threading.Event().wait(0.1)


def kill_then(pid: int, write: Callable[..., None], *args: Any) -> None:
    os.kill(pid, signal.SIGKILL)
    write(*args)


def receive(name: str, region: DeviceRegion, made_transport: Any, *, kills: bool) -> None:
    """Start a producer and receive from it, or kill it in the middle of a chunk."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "tests.support.gpu_transfer", "producer", name]
        child = subprocess.Popen([*command, str(server.getsockname()[1])])
        try:
            link: Any = FakeLink(server.accept()[0])
            local = LocalKv({0: region}, None)
            end, details = made_transport.consumer(local, heard(link), link)
            say(link, details)
            if kills:
                for hooked in WRITERS:
                    setattr(region, hooked, partial(kill_then, child.pid, getattr(region, hooked)))
            whole = PagePart(0, 0, 0, region.geometry.page_bytes, 0, 0, LAYERS)
            for _ in range(2):
                while isinstance(message := link.read(), Inner):  # NCCL joins and connects
                    end.on_inner(message.body)
                copy = end.receive(message, TO, whole)
                assert copy.wait() == link.read().digests
            assert not kills, "a producer that was killed sent a whole chunk"
        except (KvTransferError, OSError):
            if not kills:
                raise
            for hooked in WRITERS:
                delattr(region, hooked)
        finally:
            child.kill()
            child.wait(30)
        end.close()
        link.close()


def main(role: str, name: str, port: str = "0") -> None:
    if os.environ.get("GPU_TEST_HOSTS"):
        # Look like two hosts to NCCL, which allows only one rank per GPU and host.
        os.environ["NCCL_HOSTID"] = f"host-{os.getpid()}"
        nccl.ONE_GPU_VERSION = 0
    if role == "producer":
        producer(name, int(port))
        return
    cache, region, made_transport = made(name, 2)
    if role == "kill":
        receive(name, region, made_transport, kills=True)
        cache.copy_(on_gpu(random_cache(2, layers=LAYERS), LAYOUT)[0])
    receive(name, region, made_transport, kills=False)
    want = random_cache(2, layers=LAYERS)
    want[:, TO] = random_cache(1, layers=LAYERS)[:, FROM]
    assert torch.equal(cache.cpu(), want)
    assert made_transport.usage().lost_slots == 0
    print("exact")  # noqa: T201 - to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
