"""What an engine says of its progress: a long step is none that hangs."""

from __future__ import annotations

import pytest

from pdserve.types import WorkerLoad
from workers.vllm.steps import _COLD_STEPS as COLD_STEPS
from workers.vllm.steps import _SLACK as FACTOR
from workers.vllm.steps import _UNKNOWN_S as UNKNOWN_S
from workers.vllm.steps import Progress

LOAD = WorkerLoad(0, 0, 0.0, 10)


def now_of(board: Progress, *, has_more: bool = False) -> WorkerLoad:
    return board.add_to(LOAD, has_more=has_more)


def warm(*, sees_layers: bool, tokens: int = 8, seconds: float = 0.5) -> Progress:
    """Past the steps in which code may be compiled."""
    board = Progress()
    board.sees_layers = sees_layers
    for _ in range(COLD_STEPS):
        board.begin(0.0, has_work=True)
        board.sized(tokens)
        board.end(seconds, computed=True, has_work=True)
    return board


def test_each_step_that_computes_counts() -> None:
    board = warm(sees_layers=True)
    before = now_of(board).progress
    board.begin(1.0, has_work=True)
    board.end(2.0, computed=False, has_work=True)
    assert now_of(board).progress == before, "it looked after transfers alone"
    board.begin(2.0, has_work=True)
    board.end(3.0, computed=True, has_work=False)
    assert now_of(board).progress == before + 1


def test_a_long_step_gets_on_by_its_layers() -> None:
    board = warm(sees_layers=True)
    board.begin(0.0, has_work=True)
    board.sized(8)
    before = now_of(board)
    assert before.step_allowance_s == 0.5
    board.tick()
    assert now_of(board).progress == before.progress + 1


def test_what_cannot_be_looked_into_may_take_longer_than_its_like() -> None:
    board = warm(sees_layers=False)
    assert now_of(board).step_allowance_s == 0.0
    board.begin(0.0, has_work=True)
    board.sized(8)
    assert now_of(board).step_allowance_s == FACTOR * 0.5
    board.end(1.0, computed=True, has_work=True)
    assert now_of(board).step_allowance_s == 0.0
    board.begin(1.0, has_work=True)
    board.sized(4096)
    assert now_of(board).step_allowance_s == UNKNOWN_S, "nothing like it was measured"


def test_the_first_steps_may_compile() -> None:
    board = Progress()
    board.sees_layers = True
    for _ in range(COLD_STEPS):
        board.begin(0.0, has_work=True)
        board.sized(1)
        assert now_of(board).step_allowance_s == UNKNOWN_S
        board.end(0.1, computed=True, has_work=True)
    board.begin(0.0, has_work=True)
    board.sized(1)
    assert now_of(board).step_allowance_s == 0.1


@pytest.mark.parametrize(
    ("seen", "tokens", "longest_s"),
    [
        pytest.param([], 32, None, id="nothing"),
        pytest.param([(32, 0.2)], 63, 0.2, id="as many, nearly"),
        pytest.param([(32, 0.2)], 64, 0.4, id="half as many"),
        pytest.param([(32, 0.2)], 512, None, id="a sixteenth"),
        pytest.param([(4096, 9.0)], 2048, None, id="more"),
        pytest.param([(8, 1.0), (8, 0.1)], 8, 0.97, id="the longest, as it fades"),
        pytest.param([(8, 0.1)] * 4 + [(8, 30.0)], 8, 0.4, id="a pause of the machine"),
        pytest.param([(8, 0.1)] * 4 + [(8, 2.0)] * 4, 8, 2.0, id="slower from now on"),
    ],
)
def test_steps_of_a_size_tell_how_long_the_next_one_takes(
    seen: list[tuple[int, float]], tokens: int, longest_s: float | None
) -> None:
    progress = Progress()
    for count, seconds in seen:
        progress.begin(0.0, has_work=True)
        progress.sized(count)
        progress.end(seconds, computed=True, has_work=True)
    found = progress._longest_like(tokens)
    assert found is None if longest_s is None else found == pytest.approx(longest_s)
