"""Usage and receipt of an answer, from what its streams reported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.types import Receipt, Role, Usage
from router.handoff import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.upstream import Answer


def usage_of(answer: Answer, prompt_tokens: int) -> Usage:
    """Count each token once, however often it was computed."""
    return Usage(prompt_tokens, len(answer.tokens), _cached_tokens(answer))


def _cached_tokens(answer: Answer) -> int:
    first = answer.first_token_stream
    return 0 if first is None or first.report is None else first.report.cached_tokens


def receipt_of(
    answer: Answer, retries: Sequence[str], *, admission_s: float, predicted_ttft_s: float = 0.0
) -> Receipt:
    """Sum the seconds of all attempts. The queue time of decode is left out, because it passes
    beside prefill. Workers and transfer are those of the last attempt."""
    reported = [(x, x.report) for x in answer.streams if x.report is not None]
    transfer = next((r.transfer for _, r in reversed(reported) if r.transfer is not None), None)
    first = answer.first_token_stream
    last = next((x for x in reversed(answer.streams) if x.phase is not Phase.PREFILL), None)
    decoded = last is not None and (len(answer.tokens) > 1 or last.role is Role.AGGREGATED)
    return Receipt(
        queue_s=admission_s + sum(r.queue_s for x, r in reported if x.phase is not Phase.DECODE),
        prefill_s=sum(r.prefill_s for _, r in reported),
        decode_s=sum(r.decode_s for _, r in reported),
        transfer_s=0.0 if transfer is None else transfer.transfer_s,
        exposed_transfer_s=0.0 if transfer is None else transfer.exposed_s,
        transfer_bytes=0 if transfer is None else transfer.bytes,
        transfer_blocks=0 if transfer is None else transfer.blocks,
        transport="" if transfer is None else transfer.transport,
        prefill_worker="" if first is None else first.worker_id,
        decode_worker=last.worker_id if last is not None and decoded else "",
        cached_tokens=_cached_tokens(answer),
        first_token_source="" if first is None else first.role.value,
        fallbacks=tuple(retries),
        predicted_ttft_s=predicted_ttft_s,
    )


def combined_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of several answers to one prompt, which is counted once."""
    first = usages[0]
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return Usage(first.prompt_tokens, completion_tokens, first.cached_tokens)


def combined_receipt(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt of several answers to one prompt. They run side by side, so times are
    those of the longest; the workers are those of the answer whose KV was transferred."""
    if len(receipts) == 1:
        return receipts[0]
    base = next((receipt for receipt in receipts if receipt.transport), receipts[0])
    return replace(
        base,
        queue_s=max(receipt.queue_s for receipt in receipts),
        prefill_s=max(receipt.prefill_s for receipt in receipts),
        decode_s=max(receipt.decode_s for receipt in receipts),
        transfer_bytes=sum(receipt.transfer_bytes for receipt in receipts),
        transfer_blocks=sum(receipt.transfer_blocks for receipt in receipts),
        fallbacks=tuple(name for receipt in receipts for name in receipt.fallbacks),
    )
