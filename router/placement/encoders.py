"""Decide whether an encode worker computes the embeddings of a request's images, and which one. It
helps if the prefill worker is busy: the images are encoded while other prompts are computed. An
idle prefill worker encodes them itself, without a transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from router.placement.values import MemberState, may_hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.values import Cached, Candidate, Decision, Demand

# Allowance for the transfer of embeddings and for prediction errors.
MARGIN_S = 0.005


class EncoderChoice(Struct, frozen=True):
    """`worker_id`: the encode worker, "" if prefill encodes. `reason`: why, for `explain`."""

    worker_id: str = ""
    reason: str = ""


class EncodeTimes(Protocol):
    """Predictions of CostModel, None while there are too few measurements."""

    def encode_s(self, model: str, tokens: int) -> float | None:
        """Return the encode time of `tokens` image tokens."""
        ...

    def prefill_wait_s(self, demand: Demand, prefill: Candidate, cached: Cached) -> float | None:
        """Return the time until a prefill worker starts with a prompt."""
        ...


def choose_encoder(
    decision: Decision, encoders: Sequence[Candidate], costs: EncodeTimes | None
) -> EncoderChoice:
    """Choose the encoder of a placed request with images. `encoders`: the encode workers of its
    model."""
    placement, demand = decision.placement, decision.demand
    prefill = None if placement is None else placement.prefill
    if prefill is None:
        return EncoderChoice(reason="one worker computes the whole request")
    if demand.adapter:
        return EncoderChoice(reason="an adapter may change the encoder")
    cached, name = decision.cached.get(prefill.worker_id, 0), prefill.worker_id
    tokens = sum(length for _, offset, length in demand.media if offset + length > cached)
    if not tokens:
        return EncoderChoice(reason=f"{name} has the images in its KV cache")
    ready = [
        c
        for c in encoders
        if c.state is MemberState.READY
        and may_hold(demand.regions, c.info.topology)
        and c.worker_id not in demand.without | demand.avoid
        and (c.worker_id, name) not in demand.excluded
    ]
    if not ready:
        return EncoderChoice(reason="no encode worker is ready")
    best = min(ready, key=lambda c: (c.outstanding_tokens, c.outstanding_requests))
    own_s = ahead_s = wait_s = None
    if costs is not None:
        own_s = costs.encode_s(demand.model, tokens)
        ahead_s = costs.encode_s(demand.model, best.outstanding_tokens)
        wait_s = costs.prefill_wait_s(demand, prefill, decision.cached)
    if own_s is None or ahead_s is None or wait_s is None:
        text = f"{name} has {prefill.outstanding_tokens} tokens ahead, {best.worker_id} has "
        text += f"{best.outstanding_tokens}; their times are not known yet"
        is_busy = prefill.outstanding_tokens > best.outstanding_tokens
        return EncoderChoice(best.worker_id if is_busy else "", text)
    text = f"encoding takes {own_s * 1e3:.1f} ms; {name} starts in {wait_s * 1e3:.1f} ms, "
    text += f"{best.worker_id} in {ahead_s * 1e3:.1f} ms"
    return EncoderChoice(best.worker_id if ahead_s + MARGIN_S < wait_s else "", text)
