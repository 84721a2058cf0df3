"""Recorded decisions to protobuf and back, with all that it takes to make them again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import InvalidRequest
from pdserve.kv_pairs import kind_of
from pdserve.v1 import admin_pb2 as a
from router.member import MemberState
from router.placement.context import Prediction
from router.placement.values import Candidate, Demand
from router.placement.verdicts import why_not

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.types import WorkerInfo
    from router.decisions.log import Recorded, RequestDecisions
    from router.placement.values import Decision

_PREDICTED_S = tuple(f.name for f in fields(Prediction) if f.name.endswith("_s"))


@dataclass(frozen=True, slots=True)
class Given:
    """What a policy was given for a recorded decision, and what it answered: ids of a prefill and a
    decode worker, None where there was none. `recorded_as` is the policy that decided."""

    request_id: str
    recorded_as: str
    candidates: Sequence[Candidate]
    demand: Demand
    turn: int
    cached: Mapping[str, int]
    asked_prefix: bool
    predictions: Mapping[tuple[str | None, str], Prediction]
    chosen: tuple[str | None, str | None]
    refused: str


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


def given_from_pb(
    message: a.ExplainedRequest, workers: Mapping[str, WorkerInfo]
) -> Iterator[Given]:
    """The decisions of one request; `workers` as they were said before it. Raises InvalidRequest
    naming the field where one cannot be made again."""
    for decision in message.decisions:
        candidates = [_candidate(c, workers) for c in decision.candidates]
        yield Given(
            request_id=message.request_id,
            recorded_as=decision.policy,
            candidates=candidates,
            demand=Demand(
                model=decision.model,
                prompt_tokens=decision.prompt_tokens,
                kv_tokens=decision.kv_tokens,
                prefill_only=decision.prefill_only,
                avoid=frozenset(decision.avoid),
                barred=frozenset((pair.prefill, pair.decode) for pair in decision.excluded),
                request_id=message.request_id,
                forks=decision.forks,
                fork_tokens=decision.fork_tokens,
            ),
            turn=decision.turn,
            cached={c.worker_id: c.cached_tokens for c in decision.candidates if c.cached_tokens},
            asked_prefix=decision.asked_prefix,
            predictions={
                (p.prefill or None, p.decode): _prediction(p) for p in decision.predictions
            },
            chosen=(decision.prefill or None, decision.decode or None),
            refused=decision.refused,
        )


def _candidate(message: a.PlacementCandidate, workers: Mapping[str, WorkerInfo]) -> Candidate:
    info = workers.get(message.worker_id)
    if info is None:
        raise InvalidRequest(
            f"worker {message.worker_id} is not described before the decision that names it",
            field="candidates.worker_id",
        )
    if message.state not in list(MemberState):
        raise InvalidRequest(f"{message.state!r} is no state", field="candidates.state")
    return Candidate(
        worker_id=info.worker_id,
        role=info.role,
        kind=kind_of(info),
        capacity_tokens=info.total_blocks * info.block_size,
        info=info,
        state=MemberState(message.state),
        load=wire.load_from_pb(message.load) if message.HasField("load") else None,
        outstanding_requests=message.outstanding_requests,
        outstanding_tokens=message.outstanding_tokens,
        reserved_blocks=message.reserved_blocks,
    )


def _prediction(message: a.PlacementPrediction) -> Prediction:
    unknown = set(message.seconds) - set(_PREDICTED_S)
    missing = {"ttft_s", "itl_harm_s"} - set(message.seconds)
    if unknown or missing:
        raise InvalidRequest(
            f"a prediction has not {sorted(unknown or missing)}", field="predictions.seconds"
        )
    return Prediction(
        message.prefill or None, message.decode, is_habit=message.is_habit, **message.seconds
    )
