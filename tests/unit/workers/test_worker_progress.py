"""What an engine says of its progress: a long step is none that hangs."""

from __future__ import annotations

from pdserve.types import WorkerLoad
from workers.vllm.steps import _COLD_STEPS as COLD_STEPS
from workers.vllm.steps import _UNKNOWN_S as UNKNOWN_S
from workers.vllm.steps import Progress


def now_of(progress: Progress) -> WorkerLoad:
    return progress.add_to(WorkerLoad(0, 0, 0.0, 10), has_more=False)


def begun(progress: Progress, *, tokens: int = 8) -> WorkerLoad:
    progress.begin(0.0, has_work=True)
    progress.sized(tokens)
    return now_of(progress)


def warm(*, sees_layers: bool) -> Progress:
    """Past the steps in which code may be compiled, the last of which took half a second."""
    progress = Progress(sees_layers=sees_layers)
    for _ in range(COLD_STEPS):
        assert begun(progress).step_allowance_s == UNKNOWN_S
        progress.end(0.5, computed=True, has_work=True)
        assert now_of(progress).step_allowance_s == 0.0
    return progress


def test_steps_and_layers_count_and_looking_after_transfers_does_not() -> None:
    progress = warm(sees_layers=True)
    before = begun(progress).progress
    progress.tick()
    assert now_of(progress).progress == before + 1
    progress.end(1.0, computed=True, has_work=False)
    begun(progress)
    progress.end(2.0, computed=False, has_work=False)
    assert now_of(progress).progress == before + 2
    assert not now_of(progress).has_work


def test_layers_report_within_the_longest_step_which_fades() -> None:
    progress = warm(sees_layers=True)
    assert begun(progress).step_allowance_s == 0.5
    progress.end(30.0, computed=True, has_work=True)
    assert begun(progress).step_allowance_s == 30.0
    progress.end(0.5, computed=True, has_work=True)
    assert 0.5 < begun(progress).step_allowance_s < 30.0


def test_more_tokens_than_ever_or_an_engine_without_layers_may_take_long() -> None:
    assert begun(warm(sees_layers=True), tokens=9).step_allowance_s == UNKNOWN_S
    assert begun(warm(sees_layers=False)).step_allowance_s == UNKNOWN_S
