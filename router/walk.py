"""Values that the steps of a request pass along (router/serve.py). Steps import only this module.

A step is a file in `router/steps/`: an async function with the work before the rest of the walk,
`await proceed(walk)`, and the work after it. A step releases what it acquired in its own `finally`.
Facts go down in a frozen `Walk`; results come up in an `Answered`.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.types import GenerateRequest, Receipt, ServiceClass, Usage
    from router.attempt.answer import AnswerDelta, Out
    from router.attempt.placer import Reservation
    from router.attempt.streams import Answer
    from router.attempt.suspects import Suspicion
    from router.placement.values import Demand

    # The rest of a walk.
    Proceed = Callable[["Walk"], Awaitable["Answered"]]


class RequestRecord(Struct, eq=False, kw_only=True):
    """Entry of a request in the log, for the console, without its prompt and answer.

    `number` counts requests. `arrived`, `admitted` and `ended`: seconds on the event loop's clock,
    0 until it happens. `outcome` is the finish reason or the code of the error, "" while the
    request is open; "cancelled" if its client left. `ttft_s`: 0 without a first token.
    `recomputed_tokens`: see Sessions.answered. `reason` and `message` describe the error. `usage`
    and `receipt` describe the answer, or a part if `is_partial`: the request was admitted, and then
    failed or was cancelled. `ttft_met`: whether the first token met the SLO, for a request whose
    client left; None if it left before the token was due. `answers` is empty once the request has
    ended.
    """

    number: int = 0
    request_id: str
    model: str
    tenant: str
    session: str
    service_class: ServiceClass
    prompt_tokens: int
    arrived: float
    admitted: float = 0.0
    ended: float = 0.0
    ttft_s: float = 0.0
    outcome: str = ""
    reason: str = ""
    message: str = ""
    trace_id: str = ""
    recomputed_tokens: int = 0
    usage: Usage | None = None
    receipt: Receipt | None = None
    is_partial: bool = False
    ttft_met: bool | None = None
    answers: Sequence[Answer] = ()


# The records of the API call that this task answers. None: no call, as for a batch.
RECORDS: ContextVar[list[RequestRecord] | None] = ContextVar("records", default=None)


class Walk(Struct, frozen=True, eq=False):
    """A request on its way through the steps. A step that adds a fact passes on a new value
    (`structs.replace`). Only the record is changed in place.

    `out`: receives the answer; a step that reads the answer wraps it. Set by steps: `suspicion` by
    poison, `last_workers` (of the session's last turn) by session, `demand` and `reservation` by
    admit.
    """

    request: GenerateRequest
    out: Out
    record: RequestRecord
    suspicion: Suspicion
    last_workers: frozenset[str] = frozenset()
    demand: Demand | None = None
    reservation: Reservation | None = None


class Answered(Struct, eq=False):
    """Result of a walk. `last`: the last delta of all answers. It is held back until usage and
    receipt are known: the step account adds them and writes it."""

    answers: Sequence[Answer]
    last: AnswerDelta
    usage: Usage | None = None
    receipt: Receipt | None = None


class RequestStep(Protocol):
    """A step of the walk. Its constructor takes what it needs."""

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered: ...


def walk_through(steps: Sequence[RequestStep | None], end: Proceed) -> Proceed:
    """Compose the steps, outermost first, around the end of the walk. None is left out."""
    for step in reversed(steps):
        end = end if step is None else partial(step, proceed=end)
    return end
