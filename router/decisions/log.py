"""The last decisions of a router, by request."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.placement.values import Decision

# A request that is placed again and again keeps its last ones.
MAX_OF_ONE_REQUEST = 16
# References to candidates, eight bytes each: a decision over 10,000 workers names them all.
MAX_CANDIDATES = 4_000_000


@dataclass(slots=True)
class Recorded:
    """One decision, without the prompt's tokens. `cause` says why the request was placed again,
    `refused` why it was not placed at all; it came out so `tried_before` times already. Of a large
    pool `not_drawn` workers were not looked at."""

    unix_time_s: float
    decision: Decision
    cause: str = ""
    refused: str = ""
    tried_before: int = 0
    not_drawn: int = 0

    @property
    def waits(self) -> bool:
        return self.decision.placement is None and not self.refused


@dataclass(slots=True)
class RequestDecisions:
    """What was decided for one request, in order; `forgotten` counts those given up before."""

    request_id: str
    decisions: list[Recorded] = field(default_factory=list)
    forgotten: int = 0


class DecisionLog:
    """State: decisions by request, the one recorded last at the end; at most `size` of them, and a
    bounded number of candidates in all. A size of 0 keeps none."""

    def __init__(self, size: int, *, max_candidates: int = MAX_CANDIDATES) -> None:
        self._size = size
        self._max_candidates = max_candidates
        # A dict's first key is found by walking past all that were deleted before it.
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
        not_drawn: int = 0,
    ) -> None:
        """Keep a decision, and give up those of the requests not heard of for longest."""
        if not self._size:
            return
        request_id = decision.demand.request_id
        if decision.demand.token_ids:
            decision = decision.without_tokens()
        recorded = Recorded(unix_time_s, decision, cause, refused, not_drawn=not_drawn)
        request = self._requests.pop(request_id, None) or RequestDecisions(request_id)
        self._requests[request_id] = request
        self._append(request, recorded)
        while self._count > self._size or self._candidates > self._max_candidates:
            oldest = next(iter(self._requests))
            if oldest == request_id:
                self._forget(request, 1)
                if not request.decisions:
                    del self._requests[request_id]
                    return
            else:
                gone = self._requests.pop(oldest)
                self._forget(gone, len(gone.decisions))

    def _append(self, request: RequestDecisions, recorded: Recorded) -> None:
        decisions = request.decisions
        if recorded.waits and decisions and decisions[-1].waits:
            # One that waits is tried at each end of another: its last look is enough.
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
        """As it stands; None where nothing is known of it, or no longer."""
        request = self._requests.get(request_id)
        return None if request is None else replace(request, decisions=[*request.decisions])

    def all(self) -> Iterator[RequestDecisions]:
        """Those of now, each as it stands when its turn comes; the one not heard of for longest is
        the first."""
        for request_id in list(self._requests):
            request = self.of(request_id)
            if request is not None:
                yield request
