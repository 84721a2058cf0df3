"""Usage and receipt of an answer, from what its legs reported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.types import Receipt, Role, Usage
from router.leg import LegKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.handoff import Handoff
    from router.placement.context import Prediction


def build_usage(handoff: Handoff, prompt_tokens: int) -> Usage:
    """Tokens as the client sees them, counted once however often they were computed."""
    return Usage(prompt_tokens, len(handoff.tokens), _cached_tokens(handoff))


def _cached_tokens(handoff: Handoff) -> int:
    first = handoff.first_token_leg
    return 0 if first is None or first.report is None else first.report.cached_tokens


def build_receipt(
    handoff: Handoff, *, admission_s: float, prediction: Prediction | None = None
) -> Receipt:
    """What the request cost. Seconds of all attempts are summed, except that decode's wait in its
    engine passes beside prefill's; workers and transfer are those that the answer came from."""
    reported = [(leg, leg.report) for leg in handoff.legs if leg.report is not None]
    transfer = next(
        (report.transfer for _, report in reversed(reported) if report.transfer is not None), None
    )
    first = handoff.first_token_leg
    last = next((leg for leg in reversed(handoff.legs) if leg.kind is not LegKind.PREFILL), None)
    decoded = last is not None and (len(handoff.tokens) > 1 or last.role is Role.AGGREGATED)
    return Receipt(
        queue_s=admission_s
        + sum(report.queue_s for leg, report in reported if leg.kind is not LegKind.DECODE),
        prefill_s=sum(report.prefill_s for _, report in reported),
        decode_s=sum(report.decode_s for _, report in reported),
        transfer_s=0.0 if transfer is None else transfer.transfer_s,
        exposed_transfer_s=0.0 if transfer is None else transfer.exposed_s,
        transfer_bytes=0 if transfer is None else transfer.bytes,
        transfer_blocks=0 if transfer is None else transfer.blocks,
        transport="" if transfer is None else transfer.transport,
        prefill_worker="" if first is None else first.worker_id,
        decode_worker=last.worker_id if last is not None and decoded else "",
        cached_tokens=_cached_tokens(handoff),
        first_token_source="" if first is None else first.role.value,
        fallbacks=tuple(handoff.fallbacks),
        predicted_ttft_s=0.0 if prediction is None else prediction.ttft_s,
    )


def usage_of_all(usages: Sequence[Usage]) -> Usage:
    """Of several answers to one prompt, which is counted once."""
    first = usages[0]
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return Usage(first.prompt_tokens, completion_tokens, first.cached_tokens)


def receipt_of_all(receipts: Sequence[Receipt]) -> Receipt:
    """Of several answers to one prompt: they pass side by side, so the longest of each phase. Where
    the phases ran is said of the answer whose KV was moved for all of them."""
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
