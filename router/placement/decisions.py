"""Log of the latest placement decisions, and their messages for `pdserve explain`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping  # noqa: TC003 - msgspec evaluates the hints of a Struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from pdserve import wire
from pdserve.types import ModelChoice
from pdserve.v1 import admin_pb2 as a
from router.placement.filters import why_not
from router.placement.values import Prediction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.placement.values import Candidate, Decision

T = TypeVar("T")

MAX_OF_ONE_REQUEST = 16

_PREDICTED_S = tuple(x for x in Prediction.__struct_fields__ if x.endswith("_s"))


class RecordedDecision(Struct, frozen=True, gc=False):
    """One decision, without the prompt's tokens. `cause`: why the request was placed again.
    `refused`: why it was not placed. `forwarded_to`: the region that gets it, or "". `peers`: by
    other region, its prediction or why it cannot get the request.

    Not tracked by garbage collection: thousands are kept, and each collection would visit them.
    """

    unix_time_s: float
    decision: Decision
    cause: str = ""
    refused: str = ""
    forwarded_to: str = ""
    peers: Mapping[str, str] = MappingProxyType({})

    @property
    def waits(self) -> bool:
        return self.decision.placement is None and not (self.refused or self.forwarded_to)


class RecentRequests(Generic[T]):
    """Entries of the last `size` requests that have some. What was kept longest ago is dropped
    first."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Lists, because most requests have one entry, for which a deque takes 600 bytes.
        self._requests: OrderedDict[str, list[T]] = OrderedDict()

    def entries(self, request_id: str) -> list[T]:
        return self._requests.get(request_id, [])

    def keep(self, request_id: str, entries: list[T]) -> None:
        """Keep these entries of a request, and no others."""
        if self.size:
            self._requests[request_id] = entries
            self._requests.move_to_end(request_id)
            if len(self._requests) > self.size:
                self._requests.popitem(last=False)

    def of(self, request_id: str) -> list[T]:
        """Return the entries of a request, in order. An X-Request-Id chosen by a client names its
        latest request; the API prepends a prefix."""
        if found := self._requests.get(request_id):
            return found
        named = next((x for x in reversed(self._requests) if is_id_of(x, request_id)), "")
        return self._requests.get(named, [])


def is_id_of(request_id: str, named: str) -> bool:
    """Return True if a client knows this request as `named`: its id, or an X-Request-Id without
    the prefix of the API. Of several prompts, which are numbered, that names the first."""
    own = rf"([a-z]+[-_])?{re.escape(named)}(-0)?"
    return request_id == named or re.fullmatch(own, request_id) is not None


class DecisionLog(RecentRequests[RecordedDecision]):
    """Keeps the decisions of the last requests that were placed. `chosen`: the choices of virtual
    models for them."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.chosen = RecentRequests[ModelChoice](size)

    def record(
        self,
        decision: Decision,
        unix_time_s: float,
        *,
        cause: str = "",
        refused: str = "",
        forwarded_to: str = "",
        peers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if not self.size:
            return
        request_id, decision = decision.demand.request_id, decision.without_prompt()
        recorded = RecordedDecision(unix_time_s, decision, cause, refused, forwarded_to, peers)
        decisions = self.entries(request_id)
        if recorded.waits and decisions and decisions[-1].waits:
            # A waiting request is placed anew whenever another one ends. Keep only the last try.
            decisions = decisions[:-1]
        self.keep(request_id, [*decisions[1 - MAX_OF_ONE_REQUEST :], recorded])


def explained(
    decisions: list[RecordedDecision], choices: Iterable[ModelChoice] = ()
) -> a.ExplainedRequest:
    """Return the decisions of one request as a message."""
    return a.ExplainedRequest(
        request_id=decisions[0].decision.demand.request_id if decisions else "",
        decisions=[_decision_to_pb(recorded) for recorded in decisions],
        choices=map(wire.choice_to_pb, choices),
    )


def _decision_to_pb(recorded: RecordedDecision) -> a.PlacementDecision:
    decision, demand = recorded.decision, recorded.decision.demand
    placement, reasons = decision.placement, why_not(decision)
    found = a.PlacementDecision(
        unix_time_s=recorded.unix_time_s,
        cause=recorded.cause,
        refused=recorded.refused,
        forwarded_to=recorded.forwarded_to,
        peers=recorded.peers,
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
        not_drawn=decision.not_drawn,
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
