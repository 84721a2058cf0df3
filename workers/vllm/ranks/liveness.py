"""Whether the processes that run the model live: the ranks of this engine, and of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from workers.vllm.ranks.rank_links import RankLinks

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.vllm.ranks.lockstep import LockstepEngine

# After a step has failed because a rank of the group is lost, for the links to report which.
_LOST_S = 1.0


class Liveness:
    """State: `ranks`, the links to the executor's processes, if it has any; and how the executor
    died, once it has."""

    def __init__(
        self, executor: Any, group: LockstepEngine | None, host: str, wake: Callable[[], None]
    ) -> None:
        """Connect the ranks to `host`, an address of this host. `wake` is called, on any thread,
        when a rank died."""
        self._executor, self._group, self._wake = executor, group, wake
        self._died = ""
        is_multi = isinstance(executor, MultiprocExecutor)
        self.ranks = RankLinks(executor, host, self._note_lost_rank) if is_multi else None

    @property
    def wakeups(self) -> tuple[int, ...]:
        """Descriptors of the ranks, each readable when its rank found that a transfer ended."""
        return () if self.ranks is None else self.ranks.wakeups

    @property
    def died(self) -> str:
        """How the processes that run the model died; empty while they live."""
        lost = None if self._group is None else self._group.links.lost
        if lost is not None:
            return f"rank {lost} of this data-parallel group has ended"
        return self._died

    def why_failed(self) -> str:
        """Return how the processes that run the model died, after a step failed; empty if they
        live. A step of a group fails as soon as a rank is lost, often before the links report
        it."""
        if self._group is not None:
            self._group.links.until_lost(_LOST_S)
        return self.died

    def watch_executor(self) -> None:
        """Learn from vLLM when a process of the executor dies."""
        self._executor.register_failure_callback(self._note_executor_death)

    def _note_executor_death(self) -> None:
        self._died = self._died or "a process of the executor died"
        self._wake()

    def _note_lost_rank(self, rank: int) -> None:
        """End the ranks of this node, if vLLM does not do that because of `rank` itself: then it
        frees the step that waits for them. A worker without a step fails at once, too."""
        if rank >= self._executor.local_world_size:
            self._died = f"rank {rank} on another node ended, or cannot be reached"
            for handle in self._executor.workers:
                handle.proc.kill()
            self._wake()

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
