"""Prompts that wait or are computed on each worker, as far as this router placed them, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.cost.step_model import PromptWork

if TYPE_CHECKING:
    from router.cost.step_model import Batch, StepModel


@dataclass(eq=False, slots=True)
class Ticket:
    """One prompt on one worker."""

    worker: str
    work: PromptWork


@dataclass(slots=True)
class _Queue:
    tickets: dict[Ticket, None] = field(default_factory=dict)
    tokens: int = 0
    pairs: float = 0.0
    head_since: float = 0.0

    @property
    def work(self) -> PromptWork:
        return PromptWork(self.tokens, self.pairs)


class Backlog:
    """State: the tickets of each worker, first come first; when the first one's turn began. A
    worker without any takes no room."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    def __len__(self) -> int:
        return sum(len(queue.tickets) for queue in self._queues.values())

    def waiting(self, worker: str) -> int:
        """Prompts that `worker` has not computed yet."""
        queue = self._queues.get(worker)
        return 0 if queue is None else len(queue.tickets)

    def enter(self, worker: str, work: PromptWork, now: float) -> Ticket:
        """A prompt was placed on `worker`."""
        ticket = Ticket(worker, work)
        queue = self._queues.get(worker)
        if queue is None:
            queue = self._queues[worker] = _Queue(head_since=now)
        queue.tickets[ticket] = None
        queue.tokens += work.tokens
        queue.pairs += work.pairs
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """It was computed, or given up; again does nothing."""
        queue = self._queues.get(ticket.worker)
        if queue is None or ticket not in queue.tickets:
            return
        if next(iter(queue.tickets)) is ticket:
            queue.head_since = now
        del queue.tickets[ticket]
        if not queue.tickets:
            del self._queues[ticket.worker]
            return
        queue.tokens -= ticket.work.tokens
        queue.pairs -= ticket.work.pairs

    def first_token_s(
        self, worker: str, work: PromptWork, model: StepModel, beside: Batch, now: float
    ) -> tuple[float, float] | None:
        """The wait for what is ahead of a prompt that came now, and from then to its first token.
        Engines compute prompts in the order in which they come, several in a step where they fit.
        None where the model does not know."""
        alone = model.prefill_s(work, beside)
        queue = self._queues.get(worker)
        if alone is None or queue is None:
            return None if alone is None else (0.0, alone)
        together = model.prefill_s(queue.work + work, beside)
        first = next(iter(queue.tickets)).work
        # However long it is: a guess at what is ahead is better than none.
        head = model.prefill_s(PromptWork(first.tokens, first.pairs), beside)
        if together is None or head is None:
            return None
        done = min(now - queue.head_since, head)
        return max(0.0, together - done - alone), alone
