"""A pool in mid-work: half its workers prefill, half decode, each loaded differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.types import KvEndpoint, ModelInfo, Role, WorkerInfo, WorkerLoad
from router.pool import WorkerPool

if TYPE_CHECKING:
    from router.member import Member

MODEL = ModelInfo("model", "/model", max_model_len=32768, vocab_size=128000, dtype="bfloat16")
BLOCKS, BLOCK_SIZE, SEATS = 20000, 16, 256


def busy_pool(workers: int) -> WorkerPool:
    """`workers` of them, all ready and of one layout."""
    pool = WorkerPool(lease_s=60.0)
    for index in range(workers):
        role = Role.DECODE if index % 2 else Role.PREFILL
        info = WorkerInfo(
            worker_id=f"{role}-{index}",
            epoch="1",
            role=role,
            model=MODEL,
            address="127.0.0.1:1",
            kv=KvEndpoint(("127.0.0.1:2",), "layout", {}, ("nccl", "tcp")),
            block_size=BLOCK_SIZE,
            total_blocks=BLOCKS,
            max_num_seqs=SEATS,
        )
        pool.register(info, 0.0)
        member = pool.members[info.worker_id]
        pool.attached(member)
        occupy(member, index * 7919)
    return pool


def occupy(member: Member, seed: int) -> None:
    """Give a member some load or another."""
    running, waiting = seed % SEATS, seed % 3
    free = BLOCKS - seed % (BLOCKS // 2)
    member.load = WorkerLoad(waiting, running, 1 - free / BLOCKS, free)
    member.outstanding_requests = running
    member.outstanding_tokens = seed % 9000
    member.reserved_blocks = seed % (BLOCKS // 2)
