"""Receipt of an answer: its times, workers, transfer and price over all attempts."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.types import Receipt, Role, TokenSpan, TransferReport, WeightsSwitch
from router.attempt.handoff import Side
from router.fleet.billing import sum_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import ModelWeights
    from router.attempt.streams import Answer, WorkerStream
    from router.fleet.billing import UsageCharge

_NO_TRANSFER = TransferReport(0.0, 0.0, 0, 0, "")


def receipt_of(answer: Answer, charge: UsageCharge, *, admission_s: float) -> Receipt:
    """Return the receipt of an answer, with the seconds of all attempts.

    The queue time of decode is left out, because it overlaps with prefill. Workers and transfer are
    the last attempt's.
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
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=transfer.transfer_s,
        exposed_transfer_s=transfer.exposed_s,
        decode_s=decode_s,
        transfer_bytes=transfer.bytes,
        transfer_blocks=transfer.blocks,
        prefill_worker="" if first is None else first.worker_id,
        decode_worker="" if decode is None else decode.worker_id,
        transport=transfer.transport,
        cached_tokens=answer.cached_tokens,
        first_token_source="" if first is None else first.role.value,
        fallbacks=tuple(answer.retries),
        predicted_ttft_s=0.0 if answer.prediction is None else answer.prediction.ttft_s,
        cost=charge.cost,
        energy_j=charge.energy_j,
    )
    if (copied := answer.fetched) is not None:
        receipt.fetched_from, receipt.fetch_s = copied.holder, copied.seconds
        receipt.fetched_tokens, receipt.fetched_blocks = copied.tokens, copied.blocks
    receipt.encode_worker, receipt.encode_s = encode_worker, encode_s
    receipt.fetched_images = fetched
    labels = {x.member.info.topology.get("region") for x in (*answer.copies, *answer.streams)}
    receipt.regions = tuple(sorted(filter(None, labels)))
    receipt.spans = _spans(answer)
    receipt.stale_kv_tokens = max((x.stale_kv_tokens for x in receipt.spans), default=0)
    return receipt


def sampled_by(streams: Sequence[WorkerStream], tokens: int) -> list[tuple[WorkerStream, int, int]]:
    """Return who sampled the tokens of an answer with these streams: (stream, first token, end), in
    order."""
    streams = [x for x in streams if x.side is not Side.ENCODE and x.weights is not None]
    starts = [x.from_token for x in streams]
    for index, (before, stream) in enumerate(pairwise(streams), 1):
        if before.side is Side.PREFILL and stream.from_token == before.from_token:
            starts[index] += 1  # decode continues after the token that prefill samples
    found, end = list[tuple["WorkerStream", int, int]](), tokens
    for stream, start in zip(reversed(streams), reversed(starts), strict=True):
        if start < end:
            found.append((stream, start, end))
            end = start
    return found[::-1]


def _spans(answer: Answer) -> tuple[TokenSpan, ...]:
    """Return who sampled the tokens of an answer. Empty while all workers have their first
    weights, for which nobody asks."""
    streams = [x for x in answer.streams if x.side is not Side.ENCODE]
    if not any(x.newest and x.newest.sequence for x in streams):
        return ()
    return tuple(
        TokenSpan(weights.version or "default", x.worker_id, first, last, answer.index, stale)
        for x, start, end in sampled_by(answer.streams, len(answer.tokens))
        for weights, stale, first, last in _pieces(x, start, end)
    )


def _pieces(stream: WorkerStream, start: int, end: int) -> list[tuple[ModelWeights, int, int, int]]:
    """Return the weights that sampled the tokens of a stream from `start` to before `end`, and the
    positions with KV of older ones: (weights, positions, first token, end), in order."""
    assert stream.weights is not None, "sampled_by leaves out what was not sent"
    first = start, WeightsSwitch(stream.weights, 0)
    found = list[tuple["ModelWeights", int, int, int]]()
    for at, switch in reversed((first, *stream.switches)):
        if at < end:
            found.append((switch.weights, switch.stale_kv_tokens, max(at, start), end))
            end = at
    return found[::-1]


def fill_in(receipt: Receipt, answer: Answer, admitted: float, now: float) -> None:
    """Complete the receipt of an interrupted answer with the workers it was sent to, and with this
    router's measurement of phases that they did not report."""
    first_at = answer.first_token_at
    sent = [x for x in answer.streams[-2:] if x.side is not Side.ENCODE]
    if sent and not receipt.prefill_worker:
        receipt.prefill_worker = sent[0].worker_id
    receipt.prefill_s = receipt.prefill_s or (first_at or now) - admitted
    if first_at is not None:
        receipt.decode_s = now - first_at  # the interrupted stream has no report


def combined_receipt(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt of several answers to one prompt. They run in parallel, so each time is
    the longest one. The workers are from the answer whose KV was transferred."""
    if len(receipts) == 1:
        return receipts[0]
    return structs.replace(
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
        regions=tuple(sorted({name for x in receipts for name in x.regions})),
        spans=tuple(span for x in receipts for span in x.spans),
        stale_kv_tokens=sum(x.stale_kv_tokens for x in receipts),
        cost=sum_known(x.cost for x in receipts),
        energy_j=sum_known(x.energy_j for x in receipts),
    )
