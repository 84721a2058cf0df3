"""How much is admitted: the bounds of the queue, and what a request asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.lean import lean
from pdserve.types import ServiceClass

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest

# An answer's length as it is predicted while its request waits: most end before they may.
PREDICTED_OUTPUT_TOKENS = 256


class Reservation(Protocol):
    """What a request holds while it runs. Releasing again does nothing."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """At most so many requests run and wait; batch requests take at most `batch_share` of those
    that run. `default_retry_after_s` is what a refused client is told while no rate has been
    measured. Interactive requests are promised their first token within `ttft_s`; 0 promises
    nothing."""

    max_running_requests: int = 256
    max_queued_requests: int = 1024
    default_retry_after_s: float = 1.0
    batch_share: float = 0.75
    ttft_s: float = 0.0

    @property
    def max_running_batch(self) -> int:
        return max(1, int(self.max_running_requests * self.batch_share))


@lean
@dataclass(frozen=True, slots=True)
class Bid:
    """What a request asks of admission, in tokens; `kv_tokens` is the most it can come to hold, and
    `work_tokens` what it is predicted to compute; an answer has at most `max_tokens`. `identity` is
    the same when the same request comes again. `has_slo` says whether its first token is promised:
    not where nobody waits for it, nor where it came before and the answer goes on."""

    model: str
    prompt_tokens: int = 0
    kv_tokens: int = 0
    work_tokens: int = 1
    max_tokens: int = 1
    deadline: float | None = None
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    identity: tuple[object, ...] = ()
    has_slo: bool = False


def bid_of(request: GenerateRequest, *, kv_tokens: int, deadline: float | None) -> Bid:
    """The bid of a request that holds the KV of at most `kv_tokens`."""
    prompt_tokens = len(request.prompt_token_ids)
    max_tokens, answers = request.sampling.max_tokens, request.sampling.n
    return Bid(
        model=request.model,
        prompt_tokens=prompt_tokens,
        kv_tokens=kv_tokens,
        work_tokens=prompt_tokens + answers * min(max_tokens, PREDICTED_OUTPUT_TOKENS),
        max_tokens=max_tokens,
        deadline=deadline,
        priority=request.priority,
        service_class=request.service_class,
        tenant=request.tenant,
        identity=(request.tenant, request.model, max_tokens, answers, request.prompt_token_ids),
        has_slo=request.service_class is ServiceClass.INTERACTIVE and not request.resume,
    )
