"""Recorded decisions to protobuf and back, with all that it takes to make them again."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.v1 import admin_pb2 as a
from router.placement.context import Prediction
from router.placement.verdicts import why_not

if TYPE_CHECKING:
    from router.decisions.log import Recorded, RequestDecisions
    from router.placement.values import Candidate, Decision

_PREDICTED_S = tuple(f.name for f in fields(Prediction) if f.name.endswith("_s"))


def request_to_pb(request: RequestDecisions) -> a.ExplainedRequest:
    return a.ExplainedRequest(
        request_id=request.request_id,
        decisions=[_decision_to_pb(recorded) for recorded in request.decisions],
        forgotten=request.forgotten,
    )


def _decision_to_pb(recorded: Recorded) -> a.PlacementDecision:
    decision, demand = recorded.decision, recorded.decision.demand
    reasons = why_not(decision)
    placement = decision.placement
    scores, totals = _scores(decision)
    return a.PlacementDecision(
        unix_time_s=recorded.unix_time_s,
        cause=recorded.cause,
        policy=decision.policy,
        turn=decision.turn,
        model=demand.model,
        prompt_tokens=demand.prompt_tokens,
        kv_tokens=demand.kv_tokens,
        prefill_only=demand.prefill_only,
        avoid=sorted(demand.avoid),
        excluded=[a.ExcludedPair(prefill=p, decode=d) for p, d in sorted(demand.barred)],
        candidates=[
            a.PlacementCandidate(
                worker_id=c.worker_id,
                state=c.state.value,
                load=None if c.load is None else wire.load_to_pb(c.load),
                outstanding_requests=c.outstanding_requests,
                outstanding_tokens=c.outstanding_tokens,
                reserved_blocks=c.reserved_blocks,
                cached_tokens=decision.cached.get(c.worker_id, 0),
                why_not=reasons.get(c.worker_id, ""),
                scores=scores.get(c, ()),
                totals=totals.get(c, {}),
            )
            for c in decision.candidates
        ],
        asked_prefix=decision.asked_prefix,
        predictions=[_prediction_to_pb(prediction) for prediction in decision.predictions],
        decode="" if placement is None else placement.decode.worker_id,
        prefill=""
        if placement is None or placement.prefill is None
        else placement.prefill.worker_id,
        refused=recorded.refused,
        tried_before=recorded.tried_before,
        forks=demand.forks,
        fork_tokens=demand.fork_tokens,
        not_drawn=recorded.not_drawn,
    )


def _scores(
    decision: Decision,
) -> tuple[dict[Candidate, list[a.PlacementScore]], dict[Candidate, dict[str, float]]]:
    scores: dict[Candidate, list[a.PlacementScore]] = {}
    totals: dict[Candidate, dict[str, float]] = {}
    for phase, board in (("prefill", decision.prefill), ("decode", decision.decode)):
        if board is None:
            continue
        for (scorer, weight), column in zip(board.weighted.scorers, board.columns, strict=True):
            for candidate, score in zip(board.candidates, column, strict=True):
                scores.setdefault(candidate, []).append(
                    a.PlacementScore(
                        phase=phase, scorer=scorer.__name__, weight=weight, score=score
                    )
                )
        for candidate, total in board.totals.items():
            totals.setdefault(candidate, {})[phase] = total
    for candidate, total in decision.totals.items():
        totals.setdefault(candidate, {})["total"] = total
    return scores, totals


def _prediction_to_pb(prediction: Prediction) -> a.PlacementPrediction:
    return a.PlacementPrediction(
        prefill=prediction.prefill or "",
        decode=prediction.decode,
        seconds={name: getattr(prediction, name) for name in _PREDICTED_S},
        is_habit=prediction.is_habit,
    )
