"""Work and duration of each step of vLLM's engine, and its progress.

Patch of vLLM (0.32.0): `schedule` and `update_from_output` are replaced on the scheduler instance,
because vLLM does not report how much of a prompt a step computes, and after which context. The
engine core calls each once per step. With asynchronous scheduling, steps finish in the order in
which they were scheduled.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workers.metering.worker_account import BusyTime, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.types import WorkerLoad

    WaitsReader = Callable[[Iterable[int]], Mapping[int, float]]

# More steps are never in flight, because the engine's own batch queue is shorter.
_MAX_SCHEDULED = 16
# The allowance of a step is UNKNOWN_S in the first COLD_STEPS steps, which may compile code, and
# for a step with more tokens than any before.
COLD_STEPS = 16
UNKNOWN_S = 60.0
# An engine that does not count its layers shows no progress until a step ends. Its allowance is
# this multiple of the expected time, at least _LEAST_S.
_MARGIN, _LEAST_S = 4.0, 10.0
_READ_S = 0.25  # between two looks at the threads of an engine without progress
_FADE = 0.97  # decay of the longest step at each step, to forget a pause of the machine


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


def cpu_waits(pids: Iterable[int]) -> dict[int, float]:
    """Return the seconds for which each thread of these processes was ready to run and had no CPU.
    Empty if the kernel does not count them."""
    waits = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waits[int(path.parent.name)] = int(path.read_bytes().split()[1]) / 1e9
    return waits


class Starvation:
    """Measures how long an engine without progress has waited for a CPU, because a step that is
    slow for this reason does not hang. State: the last progress, and the waits of each thread at
    that time."""

    def __init__(self, pids: Iterable[int] = (), read: WaitsReader = cpu_waits) -> None:
        """`pids`: other processes that run the model."""
        self._pids, self._read = (os.getpid(), *pids), read
        self._progress: int | None = None
        self._before: Mapping[int, float] | None = None
        self._starved_s, self._read_at = 0.0, 0.0

    def since(self, progress: int, now: float) -> float:
        """Return the longest wait of a thread since `progress` changed. Files are read only while
        it does not change."""
        if progress != self._progress:
            self._progress, self._before, self._starved_s = progress, None, 0.0
        elif now - self._read_at >= _READ_S:
            self._read_at, waits = now, self._read(self._pids)
            before = self._before = waits if self._before is None else self._before
            self._starved_s = max((x - before.get(tid, 0.0) for tid, x in waits.items()), default=0)
        return self._starved_s


class LayerCounter(Protocol):
    """A connector that counts the layers computed so far; None if it cannot. On a GPU it would
    count launched layers, not computed ones."""

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
        starvation: Starvation | None = None,
    ) -> None:
        """`layers`: None if the model runs in other processes or on a GPU. `starvation`: None
        ignores time without a CPU."""
        self._layers = layers
        self._starvation = starvation
        self._busy = busy
        self._clock = clock
        self._scheduled: deque[tuple[StepWork | None, float, float]] = deque(maxlen=_MAX_SCHEDULED)
        self._ended_at = 0.0
        self._count = -(self._layers_done or 0)  # the self-test's layers do not count
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
            work = work_of(output)
            allowed_s = self._allowed_s(output.total_num_scheduled_tokens, work)
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

    def _allowed_s(self, tokens: int, work: StepWork | None) -> float:
        if not tokens or work is None:
            return 0.0
        is_known = self._steps >= COLD_STEPS and tokens <= self._most_tokens
        self._most_tokens = max(tokens, self._most_tokens)
        if not is_known:
            return UNKNOWN_S
        if self._layers_done is not None:
            return self._longest_s
        expected_s = self._busy.predicted_s(work.shape, self._clock())
        if expected_s is None:
            return UNKNOWN_S
        return max(_LEAST_S, _MARGIN * max(expected_s, self._longest_s))

    def begin(self, *, has_work: bool) -> None:
        """Record that the engine core starts a step."""
        self._has_work, self._began = has_work, self._clock()

    def pause(self) -> None:
        """Record that the engine starts slow work that is not a step."""
        self._allowance_s = UNKNOWN_S

    def freeze(self) -> None:
        """Record that the engine computes nothing until `thaw`."""
        self._has_work = False

    def thaw(self) -> None:
        """Record that the engine computes again. The next step begins now."""
        self._ended_at = self._clock()

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
        progress, starved_s = self._count + (self._layers_done or 0), 0.0
        if self._starvation is not None and self._has_work:
            starved_s = self._starvation.since(progress, self._clock())
        return replace(
            load,
            progress=progress,
            has_work=self._has_work or has_more,
            step_allowance_s=self._allowance_s,
            starved_s=starved_s,
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
