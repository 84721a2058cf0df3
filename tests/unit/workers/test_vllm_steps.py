"""What a step of vLLM computes, how long it took, and that a long step is none that hangs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.observe.step_costs import StepShape
from pdserve.types import WorkerLoad
from router.fleet.health import StallDetector
from workers.metering.worker_account import BusyTime, StepWork
from workers.vllm.step.watch import (
    COLD_STEPS,
    UNKNOWN_S,
    IdleSteps,
    Starvation,
    StepWatch,
    cpu_waits,
    work_of,
)


def output(
    scheduled: dict[str, int],
    *,
    new: dict[str, int] | None = None,
    cached: dict[str, int] | None = None,
    guessed: tuple[str, ...] = (),
) -> Any:
    """Return a SchedulerOutput with scheduled tokens by request, and computed tokens of new and
    known requests."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached or {}), num_computed_tokens=list((cached or {}).values())
        ),
        scheduled_spec_decode_tokens={name: [1] for name in guessed},
    )


class Scheduler:
    """vLLM's, with a clock. State: what the next step computes, and what the watch has recorded."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.now = 100.0
        self.next: Any = output({})
        self.seen: list[tuple[StepShape, float]] = []
        busy = BusyTime()
        busy.step = self._observe  # type: ignore[method-assign]
        self.layers_done: int | None = None
        self.watch = StepWatch(self, busy, self, lambda: self.now)

    def schedule(self, _throttle: bool = False) -> Any:
        return self.next

    def update_from_output(self, _output: Any, _model_output: Any) -> dict[int, Any]:
        return {}

    def _observe(self, work: StepWork, seconds: float, _now: float) -> None:
        self.seen.append((work.shape, round(seconds, 6)))

    def step(self, what: Any, took_s: float) -> None:
        self.next = what
        made = self.schedule(False)
        self.now += took_s
        self.update_from_output(made, None)

    def load(self) -> WorkerLoad:
        return self.watch.add_to(WorkerLoad(0, 0, 0.0, 10), has_more=False)

    def begin(self, *, tokens: int = 8) -> WorkerLoad:
        """Begin a step. Return its load."""
        self.watch.begin(has_work=True)
        self.next = output({"a": tokens}, new={"a": 0})
        self.schedule()
        return self.load()

    def end(self, took_s: float, *, computed: bool = True) -> None:
        self.now += took_s
        self.update_from_output(None, None)
        self.watch.end(computed=computed, has_work=False)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def warm(scheduler: Scheduler) -> Scheduler:
    """Skip the steps that may compile code; the last one took half a second."""
    scheduler.layers_done = 0
    for _ in range(COLD_STEPS):
        assert scheduler.begin().step_allowance_s == UNKNOWN_S
        scheduler.end(0.5)
        assert scheduler.load().step_allowance_s == 0.0
    return scheduler


def test_a_step_is_classified_by_what_it_computes() -> None:
    work = work_of(
        output({"a": 64, "b": 1, "c": 3, "d": 16}, new={"a": 0}, cached={"b": 40, "c": 9, "d": 32},
               guessed=("c",))
    )  # fmt: skip
    pairs = 64 * 32 + 16 * (32 + 8)
    assert work is not None
    assert work.shape == StepShape(80, pairs, 64, decode_reqs=2, decode_kv_tokens=49)


def test_time_between_steps_counts_only_while_requests_run(scheduler: Scheduler) -> None:
    scheduler.step(output({"a": 8}, new={"a": 0}), 0.5)
    scheduler.running = ["a"]
    scheduler.now += 0.125
    scheduler.step(output({"a": 1}, cached={"a": 8}), 0.25)
    scheduler.running = []
    scheduler.now += 60.0
    scheduler.step(output({"b": 8}, new={"b": 0}), 0.5)
    assert [seconds for _, seconds in scheduler.seen] == [0.5, 0.375, 0.5]


def test_a_frozen_engine_has_no_work_and_its_pause_counts_for_no_step(scheduler: Scheduler) -> None:
    scheduler.step(output({"a": 8}, new={"a": 0}), 0.5)
    scheduler.running = ["a"]
    scheduler.watch.begin(has_work=True)
    scheduler.watch.freeze()
    assert not scheduler.load().has_work
    scheduler.now += 60.0
    scheduler.watch.thaw()
    scheduler.step(output({"a": 1}, cached={"a": 8}), 0.25)
    assert [seconds for _, seconds in scheduler.seen] == [0.5, 0.25]


def test_steps_on_their_way_together_come_out_in_order(scheduler: Scheduler) -> None:
    scheduler.next = output({"a": 8}, new={"a": 0})
    scheduler.schedule()
    scheduler.running = ["a"]
    scheduler.next = output({"a": 1}, cached={"a": 8})
    scheduler.schedule()
    for took_s in (0.5, 0.25):
        scheduler.now += took_s
        scheduler.update_from_output(None, None)
    assert [(x.prefill_tokens, took) for x, took in scheduler.seen] == [(8, 0.5), (0, 0.25)]


def test_steps_and_layers_count_and_looking_after_transfers_does_not(warm: Scheduler) -> None:
    before = warm.begin().progress
    warm.layers_done = 1
    assert warm.load().progress == before + 1
    warm.end(1.0)
    warm.begin()
    warm.end(1.0, computed=False)
    assert warm.load().progress == before + 2
    assert not warm.load().has_work


def test_a_step_is_allowed_the_longest_one_which_fades(warm: Scheduler) -> None:
    assert warm.begin().step_allowance_s == 0.5
    warm.end(30.0)
    assert warm.begin().step_allowance_s == 30.0
    warm.end(0.5)
    assert 0.5 < warm.begin().step_allowance_s < 30.0


def test_a_step_that_begins_before_the_one_before_has_ended_keeps_its_allowance(
    warm: Scheduler,
) -> None:
    assert warm.begin(tokens=9).step_allowance_s == UNKNOWN_S
    warm.watch.end(computed=False, has_work=True)  # the core returned before the step was over
    assert warm.begin(tokens=1).step_allowance_s == UNKNOWN_S
    warm.end(20.0)
    assert warm.load().step_allowance_s == 0.5


def test_more_tokens_than_ever_or_an_engine_without_layers_may_take_long(warm: Scheduler) -> None:
    assert warm.begin(tokens=9).step_allowance_s == UNKNOWN_S
    warm.end(0.5)
    assert warm.begin().step_allowance_s == 0.5
    warm.end(0.5)
    warm.layers_done = None
    assert warm.begin().step_allowance_s == UNKNOWN_S


def test_steps_in_flight_are_seen_before_the_thread_sleeps() -> None:
    """The step after a wake returns the result of the previous one, which is empty."""
    synchronous, queued = IdleSteps(in_flight=1), IdleSteps(in_flight=2)
    assert synchronous.after_step(computed=False)
    for _ in range(2):  # asleep, and woken
        assert not queued.after_step(computed=False)
        assert queued.after_step(computed=False)
    assert not queued.after_step(computed=False)
    assert not queued.after_step(computed=True)
    assert not queued.after_step(computed=False)


class Gpu(Scheduler):
    """A worker on a GPU with two steps in flight: layers are launched at once, and nothing shows
    until a step ends. A router looks twice a second, `phase_s` after the steps."""

    def __init__(self, phase_s: float) -> None:
        super().__init__()
        self.now += phase_s
        self.busy = BusyTime()
        self.watch = StepWatch(self, self.busy, None, lambda: self.now)
        self.running = ["a"]
        self._stalls, self._frames = StallDetector(), 0

    def compute(self, tokens: int, before: int, took_s: float) -> str:
        """Compute a step. Return why the router takes the worker for hung."""
        self.watch.begin(has_work=True)
        self.next, why = output({"a": tokens}, cached={"a": before}), ""
        self.schedule()
        for _ in range(int(took_s * 2)):
            self.now += 0.5
            why = why or self.look()
        self.end(took_s % 0.5)
        self.watch.end(computed=True, has_work=True)
        return why

    def look(self) -> str:
        self._frames += 1
        return self._stalls.check(
            self.now, frames=self._frames, streams=1, load=self.load(), stall_s=2.0
        )


@pytest.mark.parametrize("phase_s", [0.0, 0.23, 0.41])
@pytest.mark.parametrize(("base_s", "slope_s"), [(0.9, 0.28), (1.15, 0.35), (0.2, 0.05)])
def test_steps_of_a_long_prompt_on_a_gpu_are_not_taken_for_a_hung_engine(
    base_s: float, slope_s: float, phase_s: float
) -> None:
    """Estimates for 32B on an H100, 70B on an H200 and 8B, in chunks of 8,192 tokens."""
    gpu, chunk = Gpu(phase_s), 8192
    for tokens in [chunk, 64, 1, 512, 1, 2048] * 8:
        assert gpu.compute(tokens, 0, base_s * (0.05 + tokens / chunk)) == ""
    for k in range(16):
        assert gpu.compute(chunk, k * chunk, base_s + slope_s * k) == ""
    gpu.next = output({"a": chunk}, cached={"a": 16 * chunk})
    gpu.watch.begin(has_work=True)
    gpu.schedule()
    hung = []
    for _ in range(200):
        gpu.now += 0.5
        hung.append(gpu.look())
    assert hung[-1].startswith("no engine step for"), "a step that never ends"


@pytest.mark.parametrize(("waited_share", "is_hung"), [(0.0, True), (0.9, False)])
def test_time_without_a_cpu_does_not_count(*, waited_share: float, is_hung: bool) -> None:
    """Threads of an engine are ready to run but wait, or sleep for good."""
    gpu = Gpu(0.0)
    starvation = Starvation(read=lambda _: {1: gpu.now * waited_share, 2: 5.0})
    gpu.layers_done = 0
    gpu.watch = StepWatch(gpu, gpu.busy, gpu, lambda: gpu.now, starvation)
    for _ in range(COLD_STEPS):
        assert gpu.compute(8, 0, 0.5) == ""
    assert bool(gpu.compute(8, 0, 8.0)) is is_hung


def test_the_kernel_counts_the_waits_of_threads() -> None:
    waits = cpu_waits([os.getpid(), 2**30])
    assert set(waits) <= {int(x.name) for x in Path("/proc/self/task").iterdir()}
    assert all(wait >= 0 for wait in waits.values())
