"""How long a step of vLLM's scheduler took, from the two calls that begin and end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdserve.step_moments import StepShape
from workers.vllm.steps import StepWatch, shape_of


def output(
    scheduled: dict[str, int],
    *,
    new: dict[str, int] | None = None,
    cached: dict[str, int] | None = None,
    guessed: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput: tokens scheduled by request, and computed ones of new and known ones."""
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
    """Time passes by `took` in a step, and `between` after it."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.now = 100.0
        self.next: Any = output({})

    def schedule(self, _throttle: bool = False) -> Any:
        return self.next

    def update_from_output(self, _output: Any, _model_output: Any) -> dict[int, Any]:
        return {}


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[StepShape, float]] = []

    def observe(self, shape: StepShape, seconds: float, now: float) -> None:
        self.seen.append((shape, round(seconds, 6)))


def watched() -> tuple[Scheduler, Recorder]:
    scheduler, recorder = Scheduler(), Recorder()
    StepWatch(scheduler, recorder, lambda: scheduler.now)  # type: ignore[arg-type]
    return scheduler, recorder


def step(scheduler: Scheduler, what: Any, took_s: float) -> None:
    scheduler.next = what
    made = scheduler.schedule(False)
    scheduler.now += took_s
    scheduler.update_from_output(made, None)


def test_a_step_is_told_by_what_it_computes() -> None:
    shape = shape_of(
        output({"a": 64, "b": 1, "c": 3, "d": 16}, new={"a": 0}, cached={"b": 40, "c": 9, "d": 32},
               guessed=("c",))
    )  # fmt: skip
    pairs = 64 * 32 + 16 * (32 + 8)
    assert shape == StepShape(80, pairs, 64, decode_reqs=2, decode_kv_tokens=49)


def test_what_passes_between_steps_counts_only_while_requests_run() -> None:
    scheduler, recorder = watched()
    step(scheduler, output({"a": 8}, new={"a": 0}), 0.5)
    scheduler.running = ["a"]
    scheduler.now += 0.125
    step(scheduler, output({"a": 1}, cached={"a": 8}), 0.25)
    scheduler.running = []
    scheduler.now += 60.0
    step(scheduler, output({"b": 8}, new={"b": 0}), 0.5)
    assert [seconds for _, seconds in recorder.seen] == [0.5, 0.375, 0.5]


def test_steps_on_their_way_together_come_out_in_order() -> None:
    scheduler, recorder = watched()
    scheduler.next = output({"a": 8}, new={"a": 0})
    scheduler.schedule()
    scheduler.running = ["a"]
    scheduler.next = output({"a": 1}, cached={"a": 8})
    scheduler.schedule()
    scheduler.now += 0.5
    scheduler.update_from_output(None, None)
    scheduler.now += 0.25
    scheduler.update_from_output(None, None)
    assert [(shape.prefill_tokens, took) for shape, took in recorder.seen] == [(8, 0.5), (0, 0.25)]
