"""Forks of requests whose prompt's KV is not here yet. No engine in here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import TransferFailed
from pdserve.types import ErrorInfo, FinishReason, StreamDelta
from workers.engine import AggregatedPhase

if TYPE_CHECKING:
    from workers.engine import Work


def forks_of(work: Work) -> list[Work]:
    """The forks of `work` as works of their own: its prompt from the start, with their own seed."""
    return [
        replace(
            work,
            stream_id=fork.stream_id,
            sampling=replace(work.sampling, seed=fork.seed),
            phase=AggregatedPhase(),
            resume_token_ids=(),
            forks=(),
        )
        for fork in work.forks
    ]


class WaitingForks:
    """State: works that wait for their leader's KV, and when they were submitted."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, Work, float]] = {}  # leader first; by own stream id

    @property
    def stream_ids(self) -> list[int]:
        return list(self._waiting)

    def add(self, leader: Work, submitted: float) -> None:
        """All forks of `leader` wait from now on."""
        for work in forks_of(leader):
            self._waiting[work.stream_id] = (leader.stream_id, work, submitted)

    def discard(self, stream_id: int) -> bool:
        """Whether this fork waited here, and does no more."""
        return self._waiting.pop(stream_id, None) is not None

    def take(self, leader: int) -> list[tuple[Work, float]]:
        """The forks of the stream `leader`, which wait no more."""
        if not self._waiting:
            return []
        taken = [(work, at) for owner, work, at in self._waiting.values() if owner == leader]
        for work, _ in taken:
            del self._waiting[work.stream_id]
        return taken

    def end(self, leader: int) -> list[StreamDelta]:
        """The last deltas of the forks of a stream that ended before its KV was here."""
        error = ErrorInfo(TransferFailed.code, "the stream whose KV it shares has ended")
        return [
            StreamDelta(work.stream_id, finish_reason=FinishReason.ERROR, error=error)
            for work, _ in self.take(leader)
        ]
