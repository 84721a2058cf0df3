"""Which other region gets a request that this region does not serve. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from router.placement.values import may_hold, shown_regions

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from pdserve.types import GenerateRequest, ModelInfo

# Prompt tokens for which a region publishes its TTFT. Between them it is interpolated.
PROMPT_LENGTHS = (1, 128, 1024, 8192, 65536)
# A request leaves a region that could serve it only for a TTFT that is lower by this share, because
# predictions err, and its session's cached prefix stays behind.
SPILL_GAIN = 0.25


class ModelLoad(Struct, frozen=True):
    """What a region can serve of one model. `workers`: ready ones that compute prompts. `ttft_s`:
    predicted time to the first token by prompt tokens, in increasing order; empty if not measured.
    `adapters`: keys of LoRA adapters. `weights`: digest of those of its last update, "" for
    those of the start."""

    info: ModelInfo
    workers: int
    ttft_s: Mapping[int, float]
    adapters: frozenset[str] = frozenset()
    weights: str = ""

    def predicted_s(self, prompt_tokens: int) -> float | None:
        """Return the predicted TTFT of a new prompt, None if it is unknown."""
        points = list(self.ttft_s.items())
        if len(points) < 2:
            return points[0][1] if points else None
        # The last pair that begins with a shorter prompt. The last of all also extrapolates.
        pairs = list(pairwise(points))
        fits = (x for x in reversed(pairs) if x[0][0] <= prompt_tokens)
        (low, low_s), (high, high_s) = next(fits, pairs[0])
        return max(0.0, low_s + (high_s - low_s) * (prompt_tokens - low) / (high - low))


class PeerView(Struct, frozen=True):
    """Another region as this router knows it. `reason`: why it takes no requests, "" if it does.
    `delay_s`: round trip of the link. `sent`: prompt tokens that were sent there since it published
    `models`, by model. `spill_over`: as in the configuration."""

    region: str
    address: str
    reason: str
    delay_s: float
    models: Mapping[str, ModelLoad]
    sent: Mapping[str, int]
    spill_over: bool = True

    def predicted_s(self, request: GenerateRequest) -> float | None:
        """Return the predicted TTFT of a request with the delay of the link."""
        load = self.models[request.model]
        ahead = self.sent.get(request.model, 0) // max(1, load.workers)
        found = load.predicted_s(len(request.prompt_token_ids) + len(request.resume) + ahead)
        return None if found is None else found + self.delay_s


def why_not(peer: PeerView, request: GenerateRequest, own: ModelLoad | None) -> str:
    """Return why `request` cannot go to a region, "" if it can. `own`: its model in this region,
    None if it is not here."""
    if not may_hold(request.regions, {"region": peer.region}):
        return f"the request may be in {shown_regions(request.regions or ())} alone"
    if peer.reason:
        return peer.reason
    load = peer.models.get(request.model)
    if load is None or not load.workers:
        return f"no worker is ready for model {request.model}"
    if request.adapter_key and request.adapter_key not in load.adapters:
        return f"adapter {request.adapter_key} is not loaded"
    info = load.info
    if own is not None and not _is_same_model(info, own.info):
        return "its model has another tokenizer"
    if own is not None and load.weights != own.weights:
        return "its model has other weights"
    if own is not None and request.resume and info.dtype != own.info.dtype:
        return f"the answer has begun in {own.info.dtype}, and its model has {info.dtype}"
    if len(request.prompt_token_ids) >= info.max_model_len:
        return f"its model has a context of {info.max_model_len} tokens"
    return ""


def _is_same_model(one: ModelInfo, other: ModelInfo) -> bool:
    return (one.tokenizer, one.vocab_size) == (other.tokenizer, other.vocab_size)


class PeerChoice(NamedTuple):
    """`region`: "" if none can take the request, or none is faster. `reasons`: by region, its
    prediction or why it cannot, for `explain`."""

    region: str
    reasons: Mapping[str, str]


def choose_peer(
    peers: Iterable[PeerView],
    request: GenerateRequest,
    own: ModelLoad | None,
    *,
    without: Container[str] = (),
    here_s: float | None = None,
) -> PeerChoice:
    """Choose the region with the lowest predicted TTFT for a request. Regions without a prediction
    are last, in the order of their links' delays. `own`: see why_not. `without`: regions that were
    tried. `here_s`: predicted TTFT in this region, which another one must beat by SPILL_GAIN."""
    reasons: dict[str, str] = {}
    ranked: list[tuple[bool, float, str]] = []
    for peer in peers:
        reason = why_not(peer, request, own)
        if peer.region in without:
            reason = "it was tried"
        elif not reason and here_s is not None and not peer.spill_over:
            reason = "spill_over is false"
        if not reason:
            found_s = peer.predicted_s(request)
            reason = f"TTFT not measured, link {peer.delay_s:.3f} s"
            if found_s is not None:
                reason = f"predicted TTFT {found_s:.3f} s, of which link {peer.delay_s:.3f} s"
            if here_s is None:
                order_s = peer.delay_s if found_s is None else found_s
                ranked.append((found_s is None, order_s, peer.region))
            elif found_s is not None and found_s < here_s * (1.0 - SPILL_GAIN):
                ranked.append((False, found_s, peer.region))
        reasons[peer.region] = reason
    return PeerChoice(min(ranked)[-1] if ranked else "", reasons)
