"""What became of a request, as far as costs go. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.types import Receipt, Usage


@dataclass(slots=True)
class Outcome:
    """An answered request. `placed_at` is on the router's clock; `ttft_s` counts from there.
    `tpot_s` is the mean gap between tokens but for what the second waited for KV, None where there
    was one token. `exposed_transfer_s` is None where no KV moved."""

    model: str
    placed_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    prefill_s: float
    exposed_transfer_s: float | None
    prefill_worker: str
    decode_worker: str

    @property
    def is_local(self) -> bool:
        """Whether one worker did both phases."""
        return self.prefill_worker == self.decode_worker


def outcome_of(
    model: str, usage: Usage, receipt: Receipt, *, ended_at: float, ttft_s: float, e2e_s: float
) -> Outcome:
    """Of an answer that took `e2e_s` from its placement and ended at `ended_at`."""
    exposed_s = receipt.exposed_transfer_s if receipt.transport else None
    gaps = usage.completion_tokens - 1
    return Outcome(
        model,
        ended_at - e2e_s,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        ttft_s,
        max(0.0, e2e_s - ttft_s - (exposed_s or 0.0)) / gaps if gaps else None,
        receipt.prefill_s,
        exposed_s,
        receipt.prefill_worker,
        receipt.decode_worker or receipt.prefill_worker,
    )
