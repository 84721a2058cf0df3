"""One answer that is being generated, over all its attempts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.types import StaleKv
from router.attempt.answer import AnswerDelta
from router.attempt.recovery import LIVE_KV, Recovery, RetryStep
from router.attempt.streams import Answer

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest, ModelWeights
    from router.attempt.answer import Out
    from router.attempt.attempt import Attempt
    from router.attempt.handoff import Finished
    from router.attempt.placer import Reservation
    from router.attempt.recovery import RecoveryLimits
    from router.attempt.suspects import Suspicion
    from router.placement.values import Demand


class OpenAnswer:
    """`request`: for this answer, with its own seed. `attempt`: the current one, None before the
    first. `demand`: has the revision that later attempts use."""

    def __init__(
        self,
        request: GenerateRequest,
        demand: Demand,
        answer: Answer,
        suspicion: Suspicion,
        recovery: Recovery,
    ) -> None:
        self.request, self.answer = request, answer
        self.suspicion, self.recovery = suspicion, recovery
        self.attempt: Attempt | None = None
        if extra := demand.children_tokens:
            demand = structs.replace(demand, kv_tokens=demand.kv_tokens - extra, children_tokens=0)
        self.demand = demand

    @property
    def is_only(self) -> bool:
        """True if the request has no other answers (parallel sampling)."""
        return not self.answer.index and self.answer.kv_worker is None

    @property
    def is_suspect(self) -> bool:
        return self.recovery.is_suspect(len(self.answer.tokens))

    @property
    def sampled_by(self) -> ModelWeights | None:
        """The weights that sampled the last token of the answer, None if it has no token of this
        router."""
        if len(self.answer.tokens) <= len(self.request.resume):
            return None
        return next((x.newest for x in reversed(self.answer.streams) if x.newest), None)

    def last_delta(self, end: Finished) -> AnswerDelta:
        """Record the end of the answer, and return its last delta."""
        answer, delta = self.answer, end.delta
        answer.finish_reason, answer.embedding = end.reason.value, delta.embedding
        last = AnswerDelta(delta.token_ids, delta.text, delta.logprobs)
        last.finish_reason, last.stop_reason = end.reason, delta.stop_reason
        last.index, last.prompt_logprobs = answer.index, delta.prompt_logprobs
        last.routed_experts = delta.routed_experts
        return last

    def demand_now(self) -> Demand:
        """Return the demand of the next attempt. Its prompt includes the tokens delivered."""
        made = tuple(self.answer.tokens[len(self.request.resume) :])
        return structs.replace(
            self.demand,
            prompt_tokens=self.demand.prompt_tokens + len(made),
            prefill_only=False,
            computes_all=self.demand.computes_all and not made,
            token_ids=(*self.demand.token_ids, *made),
            hashes={},
        )

    def stay_with(self, revision: str | None) -> None:
        """Use `revision` for later attempts while it has workers."""
        if self.demand.revision != revision:
            self.demand = structs.replace(self.demand, revision=revision)

    def step_of(self, reservation: Reservation) -> str:
        """Return the name of a retry on `reservation`, as in receipts."""
        if reservation.producer is not None:
            return LIVE_KV
        if reservation.is_pooling:
            return RetryStep.POOLING.value
        return RetryStep.AGGREGATED.value if reservation.prefill is None else RetryStep.PAIR.value


def open_answers(
    request: GenerateRequest,
    out: Out,
    demand: Demand,
    suspicion: Suspicion,
    limits: RecoveryLimits,
) -> list[OpenAnswer]:
    """Return the answers of a request: one, or several with parallel sampling. The first one sets
    `kv_worker` of all to the worker that holds the prompt's KV."""
    opened, sampling, stale_kv = [], request.sampling, request.stale_kv or limits.stale_kv
    if stale_kv is StaleKv.ALLOW and request.stale_kv is None:
        request = structs.replace(request, stale_kv=stale_kv)  # workers must know
    for index in range(sampling.n):
        own, kv_worker = request, None
        if sampling.n > 1:
            own = structs.replace(request, sampling=sampling.of_choice(index))
            kv_worker = None if index else asyncio.get_running_loop().create_future()
        answer = Answer(out, sampling.max_tokens, list(request.resume), index, kv_worker)
        recovery = Recovery(
            limits,
            suspicion,
            max_tokens=sampling.max_tokens,
            resumed=len(request.resume),
            deadline=request.deadline,
            wanted=demand.wanted,
            stale_kv=stale_kv,
        )
        answer.retries = recovery.retries
        opened.append(OpenAnswer(own, demand, answer, suspicion, recovery))
    return opened
