"""Embeddings: each prompt is one request to a pooling worker of its model."""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from router.fleet.accounting import StreamUsage
from router.placement.values import MemberState
from router.request.answer import Discard
from router.request.attempt import Answer, Attempt, deadline_passed
from router.request.handoff import Failed, Finished, Side
from router.request.placer import Reservation
from router.request.retry import RETRYABLE

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest
    from router.admission import AdmissionController, Slot
    from router.fleet.accounting import Accounting
    from router.fleet.connection import Links
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.request.attempt import Moved
    from router.request.suspects import Suspects, Suspicion

# Attempts of one embedding, each on another worker if there is one.
_ATTEMPTS = 3


def pick(fleet: Fleet, model: str, avoid: frozenset[str] = frozenset()) -> Member:
    """Return the ready pooling worker of `model` with the shortest prompt queue. It is not in
    `avoid` if another is ready. Raises Unavailable if none is ready."""
    ready = [m for m in fleet.pooling(model) if m.state is MemberState.READY]
    if not ready:
        raise Unavailable(f"no pooling worker of model {model} is ready")
    others = [m for m in ready if m.worker_id not in avoid]
    return min(
        others or ready, key=lambda m: (m.placed.outstanding_tokens, m.placed.outstanding_requests)
    )


class Embedder:
    """Computes embeddings. Prompts pass admission control like other requests."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        links: Links,
        admission: AdmissionController,
        metrics: RouterMetrics,
        accounting: Accounting,
        suspects: Suspects,
    ) -> None:
        self._fleet, self._links = fleet, links
        self._admission, self._metrics = admission, metrics
        self._accounting, self._suspects = accounting, suspects

    def check(self, model: str) -> None:
        """Raise InvalidRequest if no worker computes embeddings of `model`."""
        if not self._fleet.pooling(model):
            text = f"model {model} has no pooling workers: it generates text, and no embeddings"
            raise InvalidRequest(text, field="model")

    async def embed(self, request: GenerateRequest) -> bytes:
        """Return the embedding of the prompt, float32 and little-endian.

        A worker failure is retried on another worker. Raises Overloaded, Unavailable,
        DeadlineExceeded, and the errors of the engine.
        """
        outcome = "cancelled"
        try:
            suspicion, answered = self._suspects.begin(request), False
            try:
                found = await self._embed(request, suspicion)
                answered = True
            finally:
                self._suspects.end(request, suspicion, answered=answered)
            outcome = "embedding"
        except PdserveError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.count("requests", request.model, outcome)
        return found

    async def _embed(self, request: GenerateRequest, suspicion: Suspicion) -> bytes:
        failed: list[str] = []
        while True:
            # New for each attempt: an embedding has no tokens from which to continue.
            answer = Answer(Discard(), 1, [])
            if not suspicion.count:
                worker_id, end = await self._attempt(request, failed, answer)
            else:
                # An embedding has no tokens that would clear a suspect before its end. So suspects
                # run one at a time.
                await self._suspects.check(request, suspicion)
                deadline = request.deadline or math.inf
                try:
                    async with self._suspects.turn(request.model, deadline):
                        worker_id, end = await self._attempt(request, failed, answer, ping=True)
                except TimeoutError:
                    raise deadline_passed(answer) from None
            if isinstance(end, Finished):
                work = [StreamUsage(x.member.info, x.report) for x in answer.streams]
                self._accounting.charge(work, request.tenant)
                self._metrics.count(
                    "prompt_tokens", request.model, by=len(request.prompt_token_ids)
                )
                return end.delta.embedding
            assert isinstance(end, Failed), "an embedding does not move"
            failed.append(worker_id)
            died = next((x for x in answer.streams if x.died), None)
            if died is not None:
                self._suspects.note_death(suspicion, died.member, said_so=died.engine_died)
                await self._suspects.check(request, suspicion)
            if not isinstance(end.error, RETRYABLE) or len(failed) == _ATTEMPTS:
                raise copy(end.error)  # its traceback will refer to `end`
            self._metrics.count("fallbacks", request.model, "pooling", end.error.code)

    async def _attempt(
        self, request: GenerateRequest, failed: list[str], answer: Answer, *, ping: bool = False
    ) -> tuple[str, Finished | Failed | Moved]:
        """Return the worker id and the end of one attempt. With `ping`, the worker must answer a
        ping before it gets the request."""
        avoid = frozenset(failed)
        with (
            self._admission.enter(request) as slot,
            await self._reserve(slot, request, avoid) as reservation,
        ):
            worker_id = reservation.decode.worker_id
            if ping and await self._suspects.first_silent(reservation.members) is not None:
                return worker_id, Failed(Side.DECODE, Unavailable(f"{worker_id} does not answer"))
            attempt = Attempt(self._fleet, self._links, request, reservation, answer)
            return worker_id, await attempt.run()

    async def _reserve(
        self, slot: Slot, request: GenerateRequest, avoid: frozenset[str]
    ) -> Reservation:
        while True:
            await slot.turn()
            try:
                # No placement policy: an embedding has one phase and transfers no KV.
                worker = pick(self._fleet, request.model, avoid)
            except Unavailable as reason:
                slot.wait_for(reason)
            else:
                slot.take()
                return Reservation(worker, prompt_tokens=len(request.prompt_token_ids))
