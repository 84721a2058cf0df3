"""The NCCL of the CUDA shim refuses what NCCL forbids, and waits where NCCL does."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from kv_transfer.transport.nccl import binding  # noqa: E402
from kv_transfer.transport.nccl.binding import Nccl, Result  # noqa: E402
from tests.support.gpu_caches import is_shim  # noqa: E402

pytestmark = pytest.mark.skipif(not is_shim(), reason="of the CUDA shim alone")
LIMIT_S = 60.0
MAX_CTAS = 4


def until_done(nccl: Nccl, comm: int) -> Result:
    end = time.monotonic() + LIMIT_S
    while (state := nccl.async_error(comm)) is Result.IN_PROGRESS and time.monotonic() < end:
        time.sleep(0.001)
    return state


def joined(nccl: Nccl) -> tuple[int, int]:
    """Return the two ends of a communicator."""
    unique_id = nccl.unique_id()
    sender, receiver = (nccl.comm_init(unique_id, rank, MAX_CTAS)[1] for rank in (0, 1))
    assert [until_done(nccl, comm) for comm in (sender, receiver)] == [Result.SUCCESS] * 2
    return sender, receiver


def post(nccl: Nccl, comm: int, rank: int, memory: torch.Tensor) -> Result:
    call = (nccl.send, nccl.recv)[rank]
    stream = torch.cuda.current_stream().cuda_stream
    nccl.group_start()
    call(comm, 1 - rank, memory.data_ptr(), memory.numel(), stream)
    return nccl.group_end()


def memory(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8).cuda()


def test_bytes_move_in_the_order_of_the_streams() -> None:
    nccl = binding.load()
    sender, receiver = joined(nccl)
    source, target = memory(8, 1), memory(8, 0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rank, (comm, each) in enumerate(((sender, source), (receiver, target))):
        with torch.cuda.stream(streams[rank]):
            assert post(nccl, comm, rank, each) is Result.IN_PROGRESS
    # Only the peer's first post lets this one be enqueued.
    assert [until_done(nccl, comm) for comm in (sender, receiver)] == [Result.SUCCESS] * 2
    for stream in streams:
        stream.synchronize()
    assert target.tolist() == [1] * 8
    for comm in (sender, receiver):
        assert nccl.abort(comm) is Result.SUCCESS


def test_a_post_before_the_last_call_has_ended_is_refused() -> None:
    nccl = binding.load()
    _, alone = nccl.comm_init(nccl.unique_id(), 0, MAX_CTAS)
    assert post(nccl, alone, 0, memory(8, 1)) is Result.INVALID_USAGE
    sender, receiver = joined(nccl)
    assert post(nccl, receiver, 1, memory(8, 0)) is Result.IN_PROGRESS
    assert post(nccl, receiver, 1, memory(8, 0)) is Result.INVALID_USAGE
    assert "in progress" in nccl.last_error(receiver)
    for comm in (alone, sender, receiver):
        nccl.abort(comm)


def test_other_memory_and_communicators_that_are_gone_are_refused() -> None:
    nccl = binding.load()
    sender, receiver = joined(nccl)
    assert post(nccl, sender, 0, torch.zeros(8, dtype=torch.uint8)) is Result.INVALID_ARGUMENT
    nccl.abort(receiver)
    assert post(nccl, receiver, 1, memory(8, 0)) is Result.INVALID_ARGUMENT
    assert nccl.async_error(receiver) is Result.INVALID_ARGUMENT
    nccl.abort(sender)


def test_unequal_sizes_wait_until_the_communicator_is_aborted() -> None:
    nccl = binding.load()
    sender, receiver = joined(nccl)
    source, target = memory(8, 1), memory(4, 0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rank, (comm, each) in enumerate(((sender, source), (receiver, target))):
        with torch.cuda.stream(streams[rank]):
            post(nccl, comm, rank, each)
    assert until_done(nccl, receiver) is Result.SUCCESS  # it is enqueued
    assert not streams[1].query()
    for comm in (sender, receiver):
        nccl.abort(comm)
    for stream in streams:
        stream.synchronize()
    assert target.tolist() == [0] * 4
