"""Log of the latest placement decisions, and their messages for `pdserve explain`."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve import wire
from pdserve.v1 import admin_pb2 as a
from router.placement.filters import why_not
from router.placement.values import Prediction

if TYPE_CHECKING:
    from router.placement.values import Candidate, Decision

MAX_OF_ONE_REQUEST = 16

_PREDICTED_S = tuple(x for x in Prediction.__struct_fields__ if x.endswith("_s"))


class RecordedDecision(Struct, frozen=True, gc=False):
    """One decision, without the prompt's tokens. `cause`: why the request was placed again.
    `refused`: why it was not placed.

    Not tracked by garbage collection: thousands are kept, and each collection would visit them.
    """

    unix_time_s: float
    decision: Decision
    cause: str = ""
    refused: str = ""

    @property
    def waits(self) -> bool:
        return self.decision.placement is None and not self.refused


class DecisionLog:
    """Keeps the decisions of the last `size` requests that were placed."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Lists, because most requests have one decision, for which a deque takes 600 bytes.
        self._requests: OrderedDict[str, list[RecordedDecision]] = OrderedDict()

    def record(
        self, decision: Decision, unix_time_s: float, *, cause: str = "", refused: str = ""
    ) -> None:
        if not self._size:
            return
        request_id = decision.demand.request_id
        recorded = RecordedDecision(unix_time_s, decision.without_prompt(), cause, refused)
        # Removed and added, so that the request that was placed longest ago is dropped first.
        decisions = self._requests.pop(request_id, [])
        if recorded.waits and decisions and decisions[-1].waits:
            # A waiting request is tried whenever another one ends. Keep only the last try.
            decisions.pop()
        self._requests[request_id] = [*decisions[1 - MAX_OF_ONE_REQUEST :], recorded]
        if len(self._requests) > self._size:
            self._requests.popitem(last=False)

    def of(self, request_id: str) -> list[RecordedDecision]:
        """Return the recorded decisions of a request, in order."""
        return self._requests.get(request_id, [])


def explained(decisions: list[RecordedDecision]) -> a.ExplainedRequest:
    """Return the decisions of one request as a message."""
    return a.ExplainedRequest(
        request_id=decisions[0].decision.demand.request_id,
        decisions=[_decision_to_pb(recorded) for recorded in decisions],
    )


def _decision_to_pb(recorded: RecordedDecision) -> a.PlacementDecision:
    decision, demand = recorded.decision, recorded.decision.demand
    placement, reasons = decision.placement, why_not(decision)
    found = a.PlacementDecision(
        unix_time_s=recorded.unix_time_s,
        cause=recorded.cause,
        refused=recorded.refused,
        policy=decision.policy,
        model=demand.model,
        prompt_tokens=demand.prompt_tokens,
        kv_tokens=demand.kv_tokens,
        prefill_only=demand.prefill_only,
        adapter=demand.adapter,
        images=len(demand.media),
        session=demand.session,
        session_workers=sorted(demand.session_workers),
        revision=demand.revision,
        spilled_from=demand.spilled_from,
        avoid=sorted(demand.avoid),
        excluded=[a.ExcludedPair(prefill=p, decode=d) for p, d in sorted(demand.excluded)],
        candidates=[_candidate_to_pb(c, decision, reasons) for c in decision.candidates],
        asked_prefix=decision.asked_prefix,
        encoder=decision.encoder,
        encoder_reason=decision.encoder_reason,
        predictions=[
            a.PlacementPrediction(
                prefill=prediction.prefill or "",
                decode=prediction.decode,
                seconds={name: getattr(prediction, name) for name in _PREDICTED_S},
            )
            for prediction in decision.predictions
        ],
    )
    if placement is not None:
        found.decode = placement.decode.worker_id
        found.prefill = "" if placement.prefill is None else placement.prefill.worker_id
    return found


def _candidate_to_pb(
    candidate: Candidate, decision: Decision, reasons: dict[str, str]
) -> a.PlacementCandidate:
    plan = decision.fetches.get(candidate.worker_id)
    found = a.PlacementCandidate(
        worker_id=candidate.worker_id,
        role=wire.role_to_pb(candidate.role),
        total_blocks=candidate.info.total_blocks,
        state=candidate.state.value,
        load=None if candidate.load is None else wire.load_to_pb(candidate.load),
        outstanding_requests=candidate.outstanding_requests,
        outstanding_tokens=candidate.outstanding_tokens,
        reserved_blocks=candidate.reserved_blocks,
        cached_tokens=decision.cached.get(candidate.worker_id, 0) - (plan.worth if plan else 0),
        tier_tokens=decision.in_tiers.get(candidate.worker_id, 0),
        why_not=reasons.get(candidate.worker_id, ""),
        topology=candidate.info.topology,
    )
    if plan is not None:
        found.fetch.holder, found.fetch.tokens = plan.holder, plan.missing
        found.fetch.copy_s, found.fetch.compute_s = plan.copy_s, plan.compute_s
        found.fetch.pays = plan.worth > 0
    for phase, board in (("prefill", decision.prefill), ("decode", decision.decode)):
        if board is None or candidate not in board.totals:
            continue
        found.totals[phase] = board.totals[candidate]
        row = board.candidates.index(candidate)
        for (scorer, weight), column in zip(board.weights, board.columns, strict=True):
            found.scores.add(phase=phase, scorer=scorer.__name__, weight=weight, score=column[row])
    if candidate in decision.totals:
        found.totals["total"] = decision.totals[candidate]
    return found
