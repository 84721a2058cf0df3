"""Which errors are clean: the service's own, told to the client, of a kind that says whose fault it
was and that another attempt may succeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grpc.aio import AioRpcError

from benchmarks.errors import BenchError
from pdserve import rpc
from pdserve.errors import (
    BudgetExhausted,
    Conflict,
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)

if TYPE_CHECKING:
    from benchmarks.chaos.answers import Outcome

_KINDS: Final = (
    *(Unavailable, BudgetExhausted, Overloaded),
    *(DeadlineExceeded, WorkerFailed, TransferFailed),
)
CLEAN: Final = frozenset(kind.code for kind in _KINDS)
# What another router may answer, as `pdserve.client` has it; what has begun waits for room too.
ELSEWHERE: Final = frozenset({Unavailable.code, BudgetExhausted.code, Conflict.code})
BEGUN: Final = frozenset({Overloaded.code})


class Refused(BenchError):
    """The service ended a request over HTTP with an error; ``code`` is its own name for it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: BaseException) -> str:
    """The service's own name for an error that it gave; "" for one that a client made up because
    nothing came any more."""
    if isinstance(error, Refused):
        return error.code
    said = error.__context__
    if isinstance(error, PdserveError) and isinstance(said, AioRpcError) and rpc.has_error(said):
        return error.code
    return ""


def is_clean(outcome: Outcome, within_s: float) -> bool:
    """Whether a request that failed was told why, in time."""
    return outcome.code in CLEAN and outcome.ended_s - outcome.sent_s <= within_s
