"""Ring of the latest placement decisions, and what `pdserve explain` shows of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.v1 import admin_pb2 as a
from router.placement.filters import why_not
from router.placement.values import Prediction

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.types import WorkerInfo
    from router.placement.values import Candidate, Decision

MAX_OF_ONE_REQUEST = 16
# References to candidates, eight bytes each: a decision over 10,000 workers names them all.
MAX_CANDIDATES = 4_000_000

_PREDICTED_S = tuple(f.name for f in fields(Prediction) if f.name.endswith("_s"))


@dataclass(frozen=True, slots=True)
class Recorded:
    """One decision, without the prompt's tokens. `cause` says why the request was placed again,
    `refused` why it was not placed. It was tried `tried_before` times with the same
    result."""

    unix_time_s: float
    decision: Decision
    cause: str = ""
    refused: str = ""
    tried_before: int = 0

    @property
    def waits(self) -> bool:
        return self.decision.placement is None and not self.refused


@dataclass(slots=True)
class RequestDecisions:
    """Decisions for one request, in order. `forgotten` counts older ones that are not kept."""

    request_id: str
    decisions: list[Recorded] = field(default_factory=list)
    forgotten: int = 0


class DecisionLog:
    """Keeps at most `size` decisions by request; requests without new decisions go first."""

    def __init__(self, size: int, *, max_candidates: int = MAX_CANDIDATES) -> None:
        self._size = size
        self._max_candidates = max_candidates
        # Not a dict: its first key is found by walking past all that were deleted before it.
        self._requests: OrderedDict[str, RequestDecisions] = OrderedDict()
        self._count = 0
        self._candidates = 0

    def __len__(self) -> int:
        return self._count

    def record(
        self,
        decision: Decision,
        unix_time_s: float,
        *,
        cause: str = "",
        refused: str = "",
    ) -> None:
        if not self._size:
            return
        demand = decision.demand
        # The prompt is not kept.
        decision = replace(decision, demand=replace(demand, token_ids=()))
        recorded = Recorded(unix_time_s, decision, cause, refused)
        request = self._requests.pop(demand.request_id, None)
        if request is None:
            request = RequestDecisions(demand.request_id)
        self._requests[demand.request_id] = request
        self._append(request, recorded)
        while self._count > self._size or self._candidates > self._max_candidates:
            oldest = next(iter(self._requests.values()))
            if oldest is not request:
                self._forget(oldest, len(oldest.decisions))
                del self._requests[oldest.request_id]
                continue
            self._forget(request, 1)
            if not request.decisions:
                del self._requests[request.request_id]
                return

    def _append(self, request: RequestDecisions, recorded: Recorded) -> None:
        decisions = request.decisions
        if recorded.waits and decisions and decisions[-1].waits:
            # A request that waits is tried at each end of another: the last try is enough.
            last = decisions.pop()
            self._uncount(last)
            recorded = replace(recorded, tried_before=last.tried_before + 1)
        decisions.append(recorded)
        self._count += 1
        self._candidates += len(recorded.decision.candidates)
        if len(decisions) > MAX_OF_ONE_REQUEST:
            self._forget(request, 1)

    def _forget(self, request: RequestDecisions, count: int) -> None:
        for recorded in request.decisions[:count]:
            self._uncount(recorded)
        del request.decisions[:count]
        request.forgotten += count

    def _uncount(self, recorded: Recorded) -> None:
        self._count -= 1
        self._candidates -= len(recorded.decision.candidates)

    def of(self, request_id: str) -> RequestDecisions | None:
        """Return a copy of what is kept of a request."""
        request = self._requests.get(request_id)
        return None if request is None else replace(request, decisions=[*request.decisions])

    def all(self) -> Iterator[RequestDecisions]:
        """Yield copies of all requests, the one with the oldest last decision first."""
        for request_id in list(self._requests):
            request = self.of(request_id)
            if request is not None:
                yield request


def explained(requests: Iterable[RequestDecisions]) -> Iterator[a.Explained]:
    """Yield each request, and before it the workers that it names for the first time."""
    said: dict[str, WorkerInfo] = {}
    for request in requests:
        for recorded in request.decisions:
            for candidate in recorded.decision.candidates:
                if said.get(candidate.worker_id) != candidate.info:
                    said[candidate.worker_id] = candidate.info
                    yield a.Explained(worker=wire.worker_to_pb(candidate.info))
        yield a.Explained(
            request=a.ExplainedRequest(
                request_id=request.request_id,
                decisions=[_decision_to_pb(recorded) for recorded in request.decisions],
                forgotten=request.forgotten,
            )
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
        excluded=[a.ExcludedPair(prefill=p, decode=d) for p, d in sorted(demand.excluded)],
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
        children=demand.children,
        child_tokens=demand.child_tokens,
    )


def _scores(
    decision: Decision,
) -> tuple[dict[Candidate, list[a.PlacementScore]], dict[Candidate, dict[str, float]]]:
    scores: dict[Candidate, list[a.PlacementScore]] = {}
    totals: dict[Candidate, dict[str, float]] = {}
    for phase, board in (("prefill", decision.prefill), ("decode", decision.decode)):
        if board is None:
            continue
        for (scorer, weight), column in zip(board.weights, board.columns, strict=True):
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
    )
