"""Work and duration of each step of vLLM's engine, and its progress.

Patch of vLLM (0.32.0): `schedule` and `update_from_output` are replaced on the scheduler instance,
because vLLM reports nowhere how much of a prompt a step computes, and after which context. The
engine core calls each once per step. With asynchronous scheduling, steps finish in the order in
which they were scheduled.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from workers.metering.accounting import BusyTime, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import WorkerLoad

# More steps are never in flight: the engine's own batch queue is shorter.
_MAX_SCHEDULED = 16
# The allowance of a step is UNKNOWN_S in the first COLD_STEPS steps, which may compile code, for a
# step with more tokens than any before, and in an engine that cannot report its layers.
COLD_STEPS = 16
UNKNOWN_S = 60.0
_FADE = 0.97  # factor on the longest step at each step, to forget a pause of the machine


class IdleSteps:
    """Decides when the step thread may sleep.

    With asynchronous scheduling (vLLM's `step_with_batch_queue`, two steps `in_flight`) a step
    returns the results of an earlier one. The thread therefore runs at least that many steps after
    each sleep. After one step only, it would sleep on KV that has arrived.
    """

    def __init__(self, *, in_flight: int) -> None:
        self._in_flight = in_flight
        self._without_output = 0

    def after_step(self, *, computed: bool) -> bool:
        """Return True if no step has results to return until the thread is woken."""
        self._without_output = 0 if computed else self._without_output + 1
        is_idle = self._without_output >= self._in_flight
        if is_idle:
            self._without_output = 0
        return is_idle


class LayerCounter(Protocol):
    """A connector that counts the layers computed so far; None if it cannot."""

    layers_done: int | None


class StepWatch:
    """The steps of one scheduler. Their durations are added to `busy`. For the stall detection of
    routers it reports a count of steps and layers, and the allowance of the current step: the time
    it may run without progress before it counts as stalled.

    State: the scheduled steps that are not done, each with its earliest start and its allowance;
    the end of the last step. While requests run, the time between two steps counts for the second
    one, because it delays their tokens. The step thread writes, any thread reads.
    """

    def __init__(
        self,
        scheduler: Any,
        busy: BusyTime,
        layers: LayerCounter | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layers` is None if the model runs in other processes."""
        self._layers = layers
        self._clock = clock
        self._scheduled: deque[tuple[StepWork | None, float, float]] = deque(maxlen=_MAX_SCHEDULED)
        self._ended_at = 0.0
        self._count = -(self._layers_done or 0)  # the self-test's layers are no progress
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

    @property
    def _layers_done(self) -> int | None:
        return None if self._layers is None else self._layers.layers_done

    def _allowed_s(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        is_known = self._steps >= COLD_STEPS and tokens <= self._most_tokens
        self._most_tokens = max(tokens, self._most_tokens)
        return self._longest_s if is_known and self._layers_done is not None else UNKNOWN_S

    def begin(self, *, has_work: bool) -> None:
        """Record that the engine core starts a step."""
        self._has_work, self._began = has_work, self._clock()

    def pause(self) -> None:
        """Record that the engine starts slow work that is not a step."""
        self._allowance_s = UNKNOWN_S

    def end(self, *, computed: bool, has_work: bool) -> None:
        """Record that the engine core has returned. `computed` is False if it only handled
        transfers."""
        # With asynchronous scheduling, the next step has started already.
        self._allowance_s = max((allowed_s for *_, allowed_s in self._scheduled), default=0.0)
        self._has_work = has_work
        if computed:
            self._count += 1
            self._steps += 1
            self._longest_s = max(self._clock() - self._began, _FADE * self._longest_s)

    def add_to(self, load: WorkerLoad, *, has_more: bool) -> WorkerLoad:
        """Return `load` with the progress. `has_more`: requests wait for their first step."""
        return replace(
            load,
            progress=self._count + (self._layers_done or 0),
            has_work=self._has_work or has_more,
            step_allowance_s=self._allowance_s,
        )


def work_of(output: Any) -> StepWork | None:
    """Return the work of a step from vLLM's SchedulerOutput, or None if it computes nothing. A
    request counts as decoding if it computes one token, or if its other tokens are speculative."""
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
