"""One request's state in a transfer, in vLLM's scheduler process."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kv_transfer.vllm.params import ConsumerParams, ProducerParams
    from kv_transfer.vllm.step import Arrival
    from pdserve.types import ErrorInfo


class TransferState(Enum):
    """A producer goes from COMPUTING to HELD; a consumer from WAITING to LOADING to ARRIVED to OVER
    or, if its request ends first, to CANCELLED."""

    COMPUTING = "computing"
    HELD = "held"  # the request has ended, its blocks are kept for the consumer
    WAITING = "waiting"  # no blocks yet
    LOADING = "loading"  # blocks are reserved, KV is in flight
    ARRIVED = "arrived"  # KV is complete; the worker process has not read the arrival
    CANCELLED = "cancelled"  # the request has ended, its blocks are pinned until the load ends, too
    OVER = "over"  # loaded, failed, or nothing was needed
    REFUSED = "refused"  # `error` will fail the load


@dataclass(slots=True)
class Transfer:
    """`part` is None if the request's parameters are invalid. `blocks`: number HELD, or reserved
    for a load. `early`: arrivals on ranks that vLLM has not reported yet. `arrival`: merged from
    the reported ranks. `error`: the refusal, or the failure of a rank. `reported_blocks`: full
    blocks that the worker half knows of. `is_live`: exported while decoding."""

    request: Request
    part: ConsumerParams | ProducerParams | None
    state: TransferState
    blocks: int = 0
    early: list[Arrival] = field(default_factory=list)
    arrival: Arrival | None = None
    error: ErrorInfo | None = None
    reported_blocks: int = -1
    is_live: bool = False
