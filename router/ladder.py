"""What is tried when a worker fails a request: rungs, each once, until the answer goes on.

    same prefill ─► other prefill ─► one worker ─► error

A pair comes first, for a long prefill on a decode worker slows all that decodes there. The same
prefill worker comes before others where the failure was not its own, or was of a moment: it has
the KV of the prompt in its cache. Rungs that lead nowhere (the worker is gone, no other is ready)
are passed over. Once the answer has got on by `progress_tokens`, the ladder starts from its foot.
Pure: what was placed where, and what it costs, is for others to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pdserve.errors import (
    Overloaded,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import Role

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from router.placement.values import Candidate

# Failures of a worker or of a moment; others would meet the request again elsewhere.
RETRYABLE = (WorkerFailed, TransferFailed, Unavailable, Overloaded)


# The reason of who was asked to leave a worker that is well; with its KV it takes no rung.
MOVED = "moved"
LIVE_KV = "live_kv"


class Step(StrEnum):
    """Rungs, as receipts, metrics and logs name them. ONE_WORKER does both phases."""

    SAME_PREFILL = "same_prefill"
    OTHER_PREFILL = "other_prefill"
    ONE_WORKER = "one_worker"


_STEPS = tuple(Step)  # to walk an enumeration is slow, and each request begins with all


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """`max_fallbacks` of one request in all; `progress_tokens` that start the ladder anew."""

    max_fallbacks: int = 16
    progress_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker failed a request. `prefill` is the request's last prefill worker, "" without one."""

    worker_id: str
    prefill: str
    error: PdserveError

    @property
    def is_of_a_moment(self) -> bool:
        """The same workers may well do the next time."""
        if isinstance(self.error, TransferCorrupted):
            return False
        return isinstance(self.error, TransferFailed | Overloaded)

    @property
    def is_of_a_worker(self) -> bool:
        """The worker is not to be asked again; else the pair or the moment was at fault."""
        return not isinstance(self.error, TransferFailed | Overloaded)


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to go on. `prefill` is the one worker that may prefill, "" for any; none of `without`
    may take part, and none of `avoid` where there are others."""

    step: Step
    prefill: str = ""
    without: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()

    def takes(self, candidate: Candidate) -> bool:
        """Whether a worker may take part."""
        if candidate.worker_id in self.without:
            return False
        is_first = candidate.role is not Role.DECODE
        return not (self.prefill and is_first) or candidate.worker_id == self.prefill


@dataclass(slots=True)
class Ladder:
    """State: the rungs left since the answer last got on, who has failed since, what was done."""

    limits: LadderLimits = field(default_factory=LadderLimits)
    done: list[str] = field(default_factory=list)
    _left: list[Step] = field(default_factory=lambda: list(_STEPS))
    _failed: set[str] = field(default_factory=set)
    _avoid: set[str] = field(default_factory=set)
    _from_tokens: int = 0
    _moves: int = 0  # of what was done, for no failure

    def failed(self, failure: Failure, tokens: int) -> None:
        """A worker failed after so many tokens of the answer."""
        if tokens - self._from_tokens >= self.limits.progress_tokens:
            self.restart()
        self._avoid.add(failure.worker_id)
        if failure.is_of_a_worker:
            self._failed.add(failure.worker_id)
        is_corrupted = isinstance(failure.error, TransferCorrupted)
        if is_corrupted or not failure.prefill or failure.prefill in self._failed:
            self._drop(Step.SAME_PREFILL)

    def restart(self) -> None:
        """All rungs are there again; what was done still counts."""
        self._left, self._failed, self._avoid = list(_STEPS), set(), set()

    def climb(self, prefill: str, *, pair_helps: bool) -> Rung | None:
        """The next rung, which is then used up; None at the top. A pair does not help where only
        one token is missing: its prefill would make it, and its decode have nothing to do."""
        if len(self.done) - self._moves >= self.limits.max_fallbacks:
            return None
        while self._left:
            step = self._left.pop(0)
            failed, avoid = frozenset(self._failed), frozenset(self._avoid)
            match step:
                case Step.ONE_WORKER:
                    return Rung(step, avoid=avoid)
                case Step.SAME_PREFILL if pair_helps and prefill:
                    return Rung(step, prefill, failed - {prefill}, avoid - {prefill})
                case Step.OTHER_PREFILL if pair_helps:
                    return Rung(step, "", failed, avoid)
        return None

    def took(self, step: Step, reason: str, tokens: int) -> None:
        """The request goes on by `step` since, after so many tokens."""
        self.done.append(f"{step}:{reason}")
        self._moves += reason == MOVED
        self._from_tokens = tokens

    def carried(self, tokens: int) -> None:
        """The request left a worker that is well and took its KV along."""
        self.done.append(f"{LIVE_KV}:{MOVED}")
        self._moves += 1
        self._from_tokens = tokens

    def _drop(self, step: Step) -> None:
        if step in self._left:
            self._left.remove(step)
