"""Recorded decisions made again by another policy: what each was given is given to it.

Every decision stands by itself. What would have followed from another choice (other queues, other
caches) is not followed: that takes a simulation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import Unavailable
from router.placement.context import PlacementContext
from router.placement.live import NAME as LIVE_KV
from router.placement.recompute import ALONE
from router.placement.recompute import NAME as RECOMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from router.decisions.record import Given
    from router.placement.context import Prediction
    from router.placement.policies.by_name import Policy
    from router.placement.values import Candidate, Demand


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a request went. Without `decode` it waited, or was refused; without `prefill`, `decode`
    did both phases."""

    prefill: str | None
    decode: str | None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One decision in which the two policies differ."""

    request_id: str
    turn: int
    recorded_as: str
    recorded: Outcome
    replayed: Outcome


@dataclass(slots=True)
class Replay:
    """What came of it. `recomputes`, and what one worker did for want of a pair or with KV that was
    there, are not made again, for no policy makes them; `without_cached` and `without_prediction`
    count decisions in which the policy asked what was not recorded."""

    policy: str
    decisions: int = 0
    recomputes: int = 0
    without_cached: int = 0
    without_prediction: int = 0
    differences: list[Difference] = field(default_factory=list)
    recorded_by_worker: Counter[str] = field(default_factory=Counter)
    replayed_by_worker: Counter[str] = field(default_factory=Counter)

    @property
    def same(self) -> int:
        return self.decisions - len(self.differences)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "decisions": self.decisions,
            "same": self.same,
            "recomputes": self.recomputes,
            "without_cached": self.without_cached,
            "without_prediction": self.without_prediction,
            "differences": [asdict(difference) for difference in self.differences],
            "recorded_by_worker": dict(self.recorded_by_worker),
            "replayed_by_worker": dict(self.replayed_by_worker),
        }


class _Recorded:
    """Both lookups, as far as they were asked then; remembers what it could not answer."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self.lacked_cached = False
        self.lacked_prediction = False

    def cached_tokens(self, _demand: Demand) -> Mapping[str, int]:
        self.lacked_cached = not self._given.asked_prefix
        return self._given.cached

    def predict(
        self,
        _demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        _cached: Mapping[str, int],
    ) -> Prediction | None:
        pair = (None if prefill is None else prefill.worker_id, decode.worker_id)
        found = self._given.predictions.get(pair)
        self.lacked_prediction |= found is None
        return found


def replay(recorded: Iterable[Given], name: str, policy: Policy) -> Replay:
    """Make every recorded decision again by `policy`, which is called `name`."""
    result = Replay(name)
    for given in recorded:
        if given.recorded_as in (RECOMPUTE, ALONE, LIVE_KV):
            result.recomputes += 1
            continue
        lookups = _Recorded(given)
        before = Outcome(*given.chosen, refused=bool(given.refused))
        after = _decide(given, policy, PlacementContext(lookups, lookups))
        result.decisions += 1
        result.without_cached += lookups.lacked_cached
        # What the same policy was not told then, nobody knew then.
        result.without_prediction += lookups.lacked_prediction and given.recorded_as != name
        for outcome, by_worker in (
            (before, result.recorded_by_worker),
            (after, result.replayed_by_worker),
        ):
            by_worker.update(x for x in (outcome.prefill, outcome.decode) if x is not None)
        if before != after:
            result.differences.append(
                Difference(given.request_id, given.turn, given.recorded_as, before, after)
            )
    return result


def _decide(given: Given, policy: Policy, context: PlacementContext) -> Outcome:
    try:
        decision = policy(given.candidates, given.demand, given.turn, context)
    except Unavailable:
        return Outcome(None, None, refused=True)
    placement = decision.placement
    if placement is None:
        return Outcome(None, None)
    prefill = placement.prefill
    return Outcome(None if prefill is None else prefill.worker_id, placement.decode.worker_id)
