"""Run by test_single_gpu.py in a process of its own: ROLE TRANSPORT.

both: two worker halves in this process. target: the source is a child. kill: as target, and the
child is killed half way first. source: that child. Prints `exact` when every block came as it was.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from kv_transfer import transport
from kv_transfer.device.region import device_region
from kv_transfer.handshake import Identity
from kv_transfer.protocol.plan import Shard
from kv_transfer.settings import KvSettings
from kv_transfer.transport.base import LocalKv
from kv_transfer.vllm.step import (
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
)
from kv_transfer.vllm.worker import WorkerHalf

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 8, 64, 8, 16, 256
TABLE = [(7 * n + 3) % BLOCKS for n in range(40)]
TO = [(11 * n + 5) % BLOCKS for n in range(40)]
ALL = len(TABLE) * TOKENS
LIMIT_S = 60.0
SELF = ["-m", "tests.gpu.gpu_transfer"]


def truth(seed: int, tokens: int) -> torch.Tensor:
    """What a cache of blocks of so many tokens holds."""
    dice = torch.Generator().manual_seed(seed)
    shape = (LAYERS, BLOCKS, tokens, HEADS, CONTENT)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=dice)


class Half:
    """One worker half over a cache in GPU memory."""

    def __init__(
        self, instance_id: str, name: str, seed: int, *, tokens: int = TOKENS, is_hnd: bool = False
    ) -> None:
        self.tokens = tokens
        self.truth = truth(seed, tokens)
        self.cache = self.truth.cuda()
        views = self.cache.transpose(2, 3)
        if is_hnd:
            views = views.contiguous()
            self.cache = views.transpose(2, 3)
        self.region = device_region(list(views), BLOCKS)
        settings = KvSettings(
            transports=(name,), chunk_bytes=4 << 20, staging_slot_bytes=2 << 20, lease_s=600.0
        )
        self.transports = transport.make(settings)
        self.half = WorkerHalf(settings, instance_id, self.transports)
        self.half.register(
            LocalKv(self.region, None),
            Identity(instance_id, "gpu"),
            Shard(1, self.region.geometry.page_bytes, tokens),
        )
        self.failed: set[str] = set()
        self.ended: set[str] = set()
        self.sent: set[str] = set()

    def step(self, **parts: list[object]) -> None:
        metadata = StepMetadata(**parts)  # type: ignore[arg-type]
        self.region.computed()
        self.half.before_step(metadata)
        self.half.after_step(metadata)
        self.collect()

    def collect(self) -> None:
        sent, ended, failed = self.half.take_results()
        self.sent |= sent
        self.ended |= ended
        self.failed |= failed

    def give(self, transfer_id: str, count: int) -> None:
        self.step(expected=[SourceExpected(transfer_id, f"p-{transfer_id}")])
        self.step(progress=[SourceProgress(transfer_id, TABLE[:count], count * TOKENS)])
        if count == len(TABLE):
            self.step(ended=[SourceEnded(transfer_id, (7,), True)])

    def take(self, address: str, instance_id: str, transfer_id: str, tokens: int = ALL) -> None:
        to = TO[: -(-tokens // self.tokens)]
        start = TargetStart(transfer_id, f"d-{transfer_id}", (address,), instance_id, 0, tokens, to)
        self.step(starts=[start])

    def wait(self, *others: Half) -> None:
        end = time.monotonic() + LIMIT_S
        while not self.ended:
            assert time.monotonic() < end, "the transfer did not end"
            for half in (self, *others):
                half.collect()
            time.sleep(0.001)

    def check(self, source_seed: int, tokens: int = ALL) -> None:
        assert not self.failed, self.half.take_output()
        source, want = truth(source_seed, TOKENS), self.truth.clone()
        for n in range(tokens):
            (to, at), (table, place) = divmod(n, self.tokens), divmod(n, TOKENS)
            want[:, TO[to], at] = source[:, TABLE[table], place]
        assert torch.equal(self.cache.cpu(), want)

    def close(self) -> None:
        self.half.close()
        for each in self.transports:
            each.close()


def source(name: str) -> None:
    half = Half("source", name, 1)
    print(half.half.address, flush=True)  # noqa: T201 - to the parent
    for line in sys.stdin:
        half.give(*(kind(word) for kind, word in zip((str, int), line.split(), strict=True)))
    half.close()


def child(name: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, *SELF, "source", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def target(name: str, *, kills: bool) -> None:
    half = Half("target", name, 2)
    if kills:
        process, address = child(name)
        half.take(address, "source", "killed")
        say(process, f"killed {len(TABLE) // 2}")
        end = time.monotonic() + LIMIT_S
        while not sum(share.received_blocks for share in half.half.links.targets):
            assert time.monotonic() < end, "nothing came"
            time.sleep(0.001)
        process.kill()
        process.wait(LIMIT_S)
        half.wait()
        assert half.failed == {"d-killed"}
        half.cache.copy_(half.truth)
        half.ended.clear()
        half.failed.clear()
    process, address = child(name)
    try:
        half.take(address, "source", "t")
        say(process, f"t {len(TABLE)}")
        half.wait()
        half.check(1)
    finally:
        process.kill()
        process.wait(LIMIT_S)
        half.close()


def both(name: str) -> None:
    ours, theirs = Half("source", name, 1), Half("target", name, 2)
    theirs.take(ours.half.address, "source", "t")
    ours.give("t", len(TABLE))
    theirs.wait(ours)
    theirs.check(1)
    for half in (ours, theirs):
        half.close()


def main(role: str, name: str) -> None:
    if role == "source":
        source(name)
        return
    if role == "both":
        both(name)
    else:
        target(name, kills=role == "kill")
    print("exact")  # noqa: T201 - to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
