"""What several ranks report of one load, at whichever steps, counts once and as a whole. The
scheduler half alone, with vLLM's own values around it; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from kv_transfer.vllm.scheduler import SchedulerHalf
from kv_transfer.vllm.step import Arrival, WorkerOutput
from pdserve.errors import TransferCorrupted
from pdserve.types import ErrorInfo, TransferReport

FAILED = ErrorInfo(TransferCorrupted.code, "came damaged")


def arrival(transport: str = "shm") -> Arrival:
    return Arrival("r", (7,), TransferReport(0.5, 0.1, 100, 2, transport))


def loading() -> tuple[SchedulerHalf, list[int]]:
    """A scheduler half whose request "r" is being loaded, and that request's output tokens."""
    tokens: list[int] = []
    request: Any = SimpleNamespace(
        request_id="r",
        kv_transfer_params={
            "role": "consumer",
            "transfer_id": "t",
            "producer_addresses": ["127.0.0.1:1"],
            "producer_instance_id": "e",
        },
        num_tokens=8,
        num_output_tokens=0,
        output_token_ids=tokens,
        append_output_token_ids=tokens.extend,
        structured_output_request=None,
        prompt_token_ids=list(range(8)),
    )
    half = SchedulerHalf(4, "instance_id")
    half.on_new_request(request)
    assert half.matched_tokens(request, 0) == (8, True)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    half.after_alloc(request, blocks, 8)
    assert half.ledger().in_flight_blocks == 2
    return half, tokens


def step(half: SchedulerHalf, *ranks: WorkerOutput, is_last: bool = False) -> None:
    """A step in which these ranks have something to say; `is_last` when all ranks' loads ended."""
    meta = None
    for rank in ranks:
        meta = rank if meta is None else meta.aggregate(rank)
    recving = {"r"} if is_last else None
    half.worker_output(KVConnectorOutput(finished_recving=recving, kv_connector_worker_meta=meta))


def came(transport: str = "shm") -> WorkerOutput:
    return WorkerOutput(arrivals={"r": arrival(transport)})


def broke() -> WorkerOutput:
    return WorkerOutput(failures={"r": FAILED})


@pytest.mark.parametrize("together", [True, False])
def test_what_came_to_two_ranks_is_one_arrival(together: bool) -> None:
    half, tokens = loading()
    if together:
        step(half, came(), came("tcp"), is_last=True)
    else:
        step(half, came())
        assert half.take_arrivals() == []
        assert tokens == []
        step(half, came("tcp"), is_last=True)
    (whole,) = half.take_arrivals()
    assert whole == Arrival("r", (7,), TransferReport(0.5, 0.1, 200, 2, "shm+tcp"))
    assert tokens == [7]
    assert half.ledger().is_empty


@pytest.mark.parametrize(
    "order",
    [[[broke(), came()]], [[came(), broke()]], [[came()], [broke()]], [[broke()], [came()]]],
    ids=["both at once", "the other way round", "failure last", "failure first"],
)
def test_one_rank_that_failed_fails_the_load(order: list[list[WorkerOutput]]) -> None:
    half, tokens = loading()
    for i, ranks in enumerate(order):
        assert half.ledger().in_flight_blocks == 2
        step(half, *ranks, is_last=i == len(order) - 1)
    assert half.take_arrivals() == []
    assert tokens == []
    assert half.take_failure("r") == FAILED
    assert half.take_failure("r") is None
    assert half.ledger().is_empty
    assert not half._arriving
    assert not half._failed_ranks
