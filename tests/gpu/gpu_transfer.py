"""KV between two processes on one GPU over NCCL. Run by test_single_gpu.py: ROLE [PORT].

consumer: starts a producer, receives twice, and prints `exact` if every block is what it was there.
kill: the same, after a producer that is killed in the middle of a chunk. producer: that child.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import torch

from kv_transfer import transport
from kv_transfer.device.region import DeviceRegion, device_region
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.messages import ChunkReady, Inner
from kv_transfer.settings import KvSettings
from kv_transfer.transport.base import LocalKv
from tests.unit.kv_transfer.test_nccl import FakeWire

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 8, 64, 8, 16, 256
FROM = [(7 * n + 3) % BLOCKS for n in range(40)]
TO = [(11 * n + 5) % BLOCKS for n in range(40)]


def content(seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    shape = (LAYERS, BLOCKS, TOKENS, HEADS, CONTENT)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=dice)


def made(seed: int) -> tuple[torch.Tensor, DeviceRegion, Any]:
    cache = content(seed).cuda()
    region = device_region(list(cache.transpose(2, 3)), BLOCKS)
    # 40 blocks of 1 MiB go in ten parts.
    settings = KvSettings(transports=("nccl",), staging_slot_bytes=4 << 20, receive_timeout_s=60.0)
    return cache, region, transport.make(settings)[0]


def _line(sock: socket.socket) -> bytes:
    """Read one line, and no byte after it."""
    line = b""
    while not line.endswith(b"\n"):
        line += sock.recv(1)
    return line


def producer(port: int) -> None:
    _, region, nccl = made(1)
    wire: Any = FakeWire(socket.create_connection(("127.0.0.1", port)))
    local = LocalKv(region, None)
    wire.sock.sendall(json.dumps(nccl.offer(local)).encode() + b"\n")
    details = json.loads(_line(wire.sock))
    end = nccl.producer(local, details, wire)

    def read() -> None:
        try:
            while isinstance(message := wire.read(), Inner):
                end.told(message.body)
        except (KvTransferError, OSError):
            wire.close()

    threading.Thread(target=read, daemon=True).start()
    chunk = ChunkReady("t", 0, len(FROM), len(FROM) * region.geometry.block_bytes)
    for _ in range(2):
        end.send(chunk, FROM, None)
    wire.sock.recv(1)  # until the consumer closes


def receive(nccl: Any, region: DeviceRegion, *, kills: bool) -> None:
    """Start a producer and receive from it, or kill it once it is in the middle of a chunk."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "tests.gpu.gpu_transfer", "producer"]
        child = subprocess.Popen([*command, str(server.getsockname()[1])])
        try:
            sock, _ = server.accept()
            wire: Any = FakeWire(sock)
            offer = json.loads(_line(sock))
            end, details = nccl.consumer(LocalKv(region, None), offer, wire)
            sock.sendall(json.dumps(details).encode() + b"\n")
            if kills:
                scatter = region.scatter

                def kill_then_scatter(ids: list[int], staging: torch.Tensor) -> None:
                    os.kill(child.pid, signal.SIGKILL)
                    scatter(ids, staging)

                region.scatter = kill_then_scatter  # type: ignore[method-assign, assignment]
            for _ in range(2):
                chunk = wire.read()
                end.receive(chunk, TO, None)
            assert not kills, "a producer that was killed sent a whole chunk"
        except (KvTransferError, OSError):
            if not kills:
                raise
            del region.scatter
        finally:
            child.kill()
            child.wait(30)
        end.close()
        assert end._is_idle()


def main(role: str, port: str = "0") -> None:
    if role == "producer":
        producer(int(port))
        return
    cache, region, nccl = made(2)
    if role == "kill":
        receive(nccl, region, kills=True)
        cache.copy_(content(2))
    receive(nccl, region, kills=False)
    want = content(2)
    want[:, TO] = content(1)[:, FROM]
    assert torch.equal(cache.cpu(), want)
    assert nccl.lost_slots == 0
    print("exact")  # noqa: T201 - to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
