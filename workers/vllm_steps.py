"""What each step of vLLM's engine computed and how long it took.

Contact with vLLM (0.32.0): `schedule` and `update_from_output` are shadowed on the scheduler's
instance, since nothing that vLLM reports says how much of a prompt a step computes, or behind what
context. The engine core calls them in turn, once a step each; where steps are scheduled while
others run (asynchronous scheduling) they come out in the order in which they went in.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pdserve.step_moments import StepShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.step_moments import StepRecorder

# More are never on their way: the engine's own batch queue is shorter.
_MAX_SCHEDULED = 16


class StepWatch:
    """State: the steps that were scheduled and have not come out, each with when it could begin;
    when the last came out. `on_size` is told of each how many tokens it computes. While requests
    run, what passes between two steps is part of the second: their tokens are late by it."""

    def __init__(self, scheduler: Any, recorder: StepRecorder, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._scheduled: deque[tuple[StepShape, float]] = deque(maxlen=_MAX_SCHEDULED)
        self._ended_at = 0.0
        self.on_size: Callable[[int], None] = lambda tokens: None
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            began = self._ended_at if scheduler.running else clock()
            output = schedule(*args, **kwargs)
            self._scheduled.append((shape_of(output), began))
            if output.total_num_scheduled_tokens:
                self.on_size(output.total_num_scheduled_tokens)
            return output

        def watched_update(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            self._came_out()
            return outputs

        scheduler.schedule = watched_schedule
        scheduler.update_from_output = watched_update

    def _came_out(self) -> None:
        now = self._clock()
        if self._scheduled:
            shape, began = self._scheduled.popleft()
            self._recorder.observe(shape, now - max(began, self._ended_at), now)
        self._ended_at = now


def shape_of(output: Any) -> StepShape:
    """Of vLLM's SchedulerOutput. A request with one token to compute decodes, and so does one whose
    further tokens are guesses: the last token of a prompt alone counts as decoding too."""
    scheduled, guessed = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    cached = output.scheduled_cached_reqs
    prefill_tokens = prefill_end = decode_reqs = decode_kv_tokens = 0
    prefill_pairs = 0.0
    parts = [(x.req_id, x.num_computed_tokens) for x in output.scheduled_new_reqs]
    parts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, computed in parts:
        count = scheduled.get(request_id, 0)
        if count > 1 and request_id not in guessed:
            prefill_tokens += count
            prefill_pairs += count * (computed + count / 2)
            prefill_end = max(prefill_end, computed + count)
        elif count:
            decode_reqs += 1
            decode_kv_tokens += computed
    return StepShape(prefill_tokens, prefill_pairs, prefill_end, decode_reqs, decode_kv_tokens)
