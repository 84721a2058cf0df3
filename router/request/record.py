"""What the router keeps of a request: its record for the console, and the receipt of its answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.types import Receipt, Role, TransferReport
from router.fleet.accounting import sum_known
from router.request.handoff import Side

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from pdserve.types import ServiceClass, Usage
    from router.fleet.accounting import UsageCharge
    from router.placement.values import Prediction
    from router.request.attempt import Answer, WorkerStream

RECORDS_KEPT = 10_000  # about 1 KiB each


class RequestRecord(Struct, eq=False, kw_only=True):
    """Record of a request for the console, without its prompt and answer.

    `number` counts requests. `arrived`, `admitted` and `ended` are in seconds on the event loop's
    clock, 0 if it has not happened. `outcome` is the finish reason or the code of the error, ""
    while the request is open. `recomputed_tokens`: see Sessions.answered. `reason` and `message`
    are those of the error. `answers` is empty once the request has ended.
    """

    number: int = 0
    request_id: str
    model: str
    tenant: str
    session: str
    service_class: ServiceClass
    prompt_tokens: int
    arrived: float
    admitted: float = 0.0
    ended: float = 0.0
    ttft_s: float = 0.0
    outcome: str = ""
    reason: str = ""
    message: str = ""
    trace_id: str = ""
    recomputed_tokens: int = 0
    usage: Usage | None = None
    receipt: Receipt | None = None
    answers: list[Answer] = []


@dataclass(slots=True)
class RequestLog:
    """`ended`: the last ended requests. `open`: the open requests in order of arrival. `begun`,
    `ended_count`: numbers of all requests and of all ended ones. RequestServer alone writes it."""

    ended: deque[RequestRecord]
    open: dict[RequestRecord, None] = field(default_factory=dict)
    begun: int = 0
    ended_count: int = 0


_NO_TRANSFER = TransferReport(0.0, 0.0, 0, 0, "")


def receipt_of(
    answer: Answer,
    charge: UsageCharge,
    *,
    admission_s: float,
    retries: Sequence[str],
    prediction: Prediction | None,
) -> Receipt:
    """Return the receipt of an answer, with the seconds of all attempts.

    The queue time of decode is left out, because it overlaps with prefill. Workers and transfer
    are those of the last attempt.
    """
    first = answer.first_token_stream
    queue_s, prefill_s, decode_s, transfer = admission_s, 0.0, 0.0, _NO_TRANSFER
    decode: WorkerStream | None = None
    encode_worker, encode_s, fetched = "", 0.0, 0
    for stream in answer.streams:
        if stream.side is Side.DECODE:
            decode = stream
        report = stream.report
        if report is None:
            continue
        if stream.side is Side.ENCODE:
            encode_worker, encode_s = stream.worker_id, encode_s + report.encode_s
            continue
        fetched += report.fetched_images
        overlaps = stream.side is Side.DECODE and stream.pair is not None
        queue_s += 0.0 if overlaps else report.queue_s
        prefill_s += report.prefill_s
        decode_s += report.decode_s
        transfer = report.transfer or transfer
    if decode is not None and len(answer.tokens) <= 1 and decode.role is not Role.AGGREGATED:
        decode = None  # prefill sampled the only token
    receipt = Receipt(
        queue_s,
        prefill_s,
        transfer.transfer_s,
        transfer.exposed_s,
        decode_s,
        transfer.bytes,
        transfer.blocks,
        "" if first is None else first.worker_id,
        "" if decode is None else decode.worker_id,
        transfer.transport,
        answer.cached_tokens,
        "" if first is None else first.role.value,
        tuple(retries),
        0.0 if prediction is None else prediction.ttft_s,
        *charge,
    )
    if (copied := answer.fetched) is not None:
        receipt.fetched_from, receipt.fetch_s = copied.holder, copied.seconds
        receipt.fetched_tokens, receipt.fetched_blocks = copied.tokens, copied.blocks
    receipt.encode_worker, receipt.encode_s = encode_worker, encode_s
    receipt.fetched_images = fetched
    return receipt


def combined_receipt(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt of several answers to one prompt. They run in parallel, so each time is
    the longest one. The workers are those of the answer whose KV was transferred."""
    if len(receipts) == 1:
        return receipts[0]
    return replace(
        next((x for x in receipts if x.transport), receipts[0]),
        queue_s=max(x.queue_s for x in receipts),
        prefill_s=max(x.prefill_s for x in receipts),
        decode_s=max(x.decode_s for x in receipts),
        transfer_bytes=sum(x.transfer_bytes for x in receipts),
        transfer_blocks=sum(x.transfer_blocks for x in receipts),
        fallbacks=tuple(name for x in receipts for name in x.fallbacks),
        fetched_tokens=sum(x.fetched_tokens for x in receipts),
        fetched_blocks=sum(x.fetched_blocks for x in receipts),
        fetch_s=max(x.fetch_s for x in receipts),
        cost=sum_known(x.cost for x in receipts),
        energy_j=sum_known(x.energy_j for x in receipts),
    )
