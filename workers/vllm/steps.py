"""What each step of vLLM's engine computes, how long it took, and whether the engine progresses.

Contact with vLLM (0.32.0): `schedule` and `update_from_output` are replaced on the scheduler
instance, because nothing that vLLM reports says how much of a prompt a step computes, and after
which context. The engine core calls each once a step. With asynchronous scheduling, steps finish in
the order in which they were scheduled.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workers.accounting import BusyTime, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import WorkerLoad

# More are never on their way: the engine's own batch queue is shorter.
_MAX_SCHEDULED = 16
# In these first steps code may still be compiled, so they may take this long; so may a step with
# more tokens than any before it, and every step of an engine that cannot report its layers.
COLD_STEPS = 16
UNKNOWN_S = 60.0
_FADE = 0.97  # of the longest step, at each step: a pause of the machine is forgotten


class IdleSteps:
    """Says when the step thread may sleep.

    With asynchronous scheduling (vLLM's `step_with_batch_queue`, two steps `in_flight`) a step
    returns what an earlier one found. So the thread makes that many steps after each sleep.
    """

    def __init__(self, *, in_flight: int) -> None:
        self._in_flight = in_flight
        self._without_output = 0

    def after_step(self, *, computed: bool) -> bool:
        """Return True if nothing is left to find until something wakes the thread."""
        self._without_output = 0 if computed else self._without_output + 1
        is_idle = self._without_output >= self._in_flight
        if is_idle:
            self._without_output = 0
        return is_idle


class StepWatch:
    """The steps of one scheduler: their durations go to `busy`. For routers to detect a stall, a
    count of steps and layers, and how long the step under way may show nothing.

    State: steps that are scheduled and not done, each with the time at which it could begin and how
    long it may show nothing; when the last one was done. The time between two steps is part of the
    second while requests run: it delays their tokens. The step thread writes, any thread reads.
    """

    def __init__(
        self, scheduler: Any, busy: BusyTime, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sees_layers = False
        self._clock = clock
        self._scheduled: deque[tuple[StepWork | None, float, float]] = deque(maxlen=_MAX_SCHEDULED)
        self._ended_at = 0.0
        self._count = 0
        self._has_work = False
        self._allowance_s = 0.0
        self._steps = 0
        self._most_tokens = 0
        self._longest_s = 0.0
        self._began = 0.0
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            began = self._ended_at if scheduler.running else clock()
            output = schedule(*args, **kwargs)
            allowed_s, work = self._allowed_s(output.total_num_scheduled_tokens), work_of(output)
            self._scheduled.append((work, began, allowed_s))
            if work is not None:
                busy.begin(began)
            self._allowance_s = max(self._allowance_s, allowed_s)
            return output

        def watched_update(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            now = clock()
            if self._scheduled:
                work, began, _ = self._scheduled.popleft()
                if work is not None:
                    busy.step(work, now - max(began, self._ended_at), now)
            self._ended_at = now
            return outputs

        scheduler.schedule = watched_schedule
        scheduler.update_from_output = watched_update

    def _allowed_s(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        is_known = self._steps >= COLD_STEPS and tokens <= self._most_tokens
        self._most_tokens = max(tokens, self._most_tokens)
        return self._longest_s if is_known and self.sees_layers else UNKNOWN_S

    def begin(self, *, has_work: bool) -> None:
        """The engine core begins a step."""
        self._has_work, self._began = has_work, self._clock()

    def pause(self) -> None:
        """The engine does something that is no step and may take long."""
        self._allowance_s = UNKNOWN_S

    def tick(self) -> None:
        """A layer of the step has been computed."""
        self._count += 1

    def end(self, *, computed: bool, has_work: bool) -> None:
        """The engine core has returned; `computed` is False if it only looked after transfers."""
        # With asynchronous scheduling, the next step is under way already.
        self._allowance_s = max((allowed_s for *_, allowed_s in self._scheduled), default=0.0)
        self._has_work = has_work
        if computed:
            self._count += 1
            self._steps += 1
            self._longest_s = max(self._clock() - self._began, _FADE * self._longest_s)

    def add_to(self, load: WorkerLoad, *, has_more: bool) -> WorkerLoad:
        """Return `load` with the progress; `has_more` if requests wait for their first step."""
        return replace(
            load,
            progress=self._count,
            has_work=self._has_work or has_more,
            step_allowance_s=self._allowance_s,
        )


def work_of(output: Any) -> StepWork | None:
    """Return the work of a step from vLLM's SchedulerOutput, None if it has none. A request with
    one token to compute counts as decoding, and so does one whose further tokens are
    speculative."""
    scheduled, guessed = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    cached = output.scheduled_cached_reqs
    parts = [(x.req_id, x.num_computed_tokens) for x in output.scheduled_new_reqs]
    parts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    prompts, decoding = [], []
    for part in parts:
        request_id, computed = part
        count = scheduled.get(request_id, 0)
        if count > 1 and request_id not in guessed:
            prompts.append((request_id, count, computed))
        elif count:
            decoding.append(part)
    return StepWork(prompts, decoding) if prompts or decoding else None
