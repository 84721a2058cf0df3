"""Embeddings: each prompt is a request to one of the pooling workers of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from router.accounting import Done
from router.answer import Discard
from router.handoff import Failed, Finished
from router.placement.values import MemberState
from router.placer import Reservation
from router.retry import RETRYABLE
from router.upstream import Answer, Attempt

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest
    from router.accounting import Accounting
    from router.admission import AdmissionController
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics

_ATTEMPTS = 3


def pick(fleet: Fleet, model: str, avoid: frozenset[str] = frozenset()) -> Member:
    """Return the ready pooling worker of `model` with the fewest prompt tokens before it, and none
    of `avoid` if there is another. Raises Unavailable if none is ready."""
    ready = [m for m in fleet.pooling(model) if m.state is MemberState.READY]
    if not ready:
        raise Unavailable(f"no pooling worker of model {model} is ready")
    others = [m for m in ready if m.worker_id not in avoid]
    return min(others or ready, key=lambda m: (m.outstanding_tokens, m.outstanding_requests))


class Embedder:
    """Computes embeddings. Prompts wait for admission as other requests do."""

    def __init__(
        self,
        fleet: Fleet,
        admission: AdmissionController,
        metrics: RouterMetrics,
        accounting: Accounting,
    ) -> None:
        self._fleet, self._admission, self._metrics = fleet, admission, metrics
        self._accounting = accounting

    def check(self, model: str) -> None:
        """Raises InvalidRequest if no worker computes embeddings of `model`."""
        if not self._fleet.pooling(model):
            text = f"model {model} has no pooling workers: it generates text, and no embeddings"
            raise InvalidRequest(text, field="model")

    async def embed(self, request: GenerateRequest) -> bytes:
        """Return the embedding of the prompt, float32 and little-endian.

        Raises Overloaded, Unavailable, DeadlineExceeded, and the errors of the engine; after a
        failed worker another one is asked.
        """
        outcome = "cancelled"
        try:
            found = await self._embed(request)
            outcome = "embedding"
        except PdserveError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.count("requests", request.model, outcome)
        return found

    async def _embed(self, request: GenerateRequest) -> bytes:
        failed: list[str] = []
        while True:
            with await self._admission.slot(
                request, lambda: self._reserve(request, frozenset(failed))
            ) as reservation:
                answer = Answer(Discard(), 1, [])
                with Attempt(self._fleet, request, reservation, answer) as attempt:
                    end = await attempt.pump()
            if isinstance(end, Finished):
                work = [Done(x.member.info, x.report) for x in answer.streams]
                self._accounting.charge(work, request.tenant)
                self._metrics.count(
                    "prompt_tokens", request.model, by=len(request.prompt_token_ids)
                )
                return end.delta.embedding
            assert isinstance(end, Failed), "an embedding does not move"
            failed.append(reservation.decode.worker_id)
            if not isinstance(end.error, RETRYABLE) or len(failed) == _ATTEMPTS:
                raise end.error
            self._metrics.count("fallbacks", request.model, "pooling", end.error.code)

    def _reserve(self, request: GenerateRequest, avoid: frozenset[str]) -> Reservation:
        worker = pick(self._fleet, request.model, avoid)
        return Reservation(worker, prompt_tokens=len(request.prompt_token_ids))
