"""What an engine says of its progress: a long step is none that hangs."""

from __future__ import annotations

from pdserve.types import WorkerLoad
from workers.progress import BLIND_S, COLD_STEPS, ProgressBoard

LOAD = WorkerLoad(0, 0, 0.0, 10)


def count(board: ProgressBoard, now: float) -> int:
    return board.stamp(LOAD, now, has_more=False).progress


def warm(*, sees_layers: bool) -> ProgressBoard:
    """Past the steps in which code may be compiled."""
    board = ProgressBoard()
    board.sees_layers = sees_layers
    for _ in range(COLD_STEPS):
        board.begin(0.0, has_work=True)
        board.end(0.0, computed=True, has_work=True)
    return board


def test_each_step_that_computes_counts() -> None:
    board = warm(sees_layers=True)
    before = count(board, 0.0)
    board.begin(1.0, has_work=True)
    board.end(2.0, computed=False, has_work=True)
    assert count(board, 2.0) == before, "it looked after transfers alone"
    board.begin(2.0, has_work=True)
    board.end(3.0, computed=True, has_work=False)
    assert count(board, 3.0) == before + 1


def test_a_long_step_gets_on_by_its_layers_and_hangs_without() -> None:
    board = warm(sees_layers=True)
    board.begin(0.0, has_work=True)
    first = count(board, 5.0)
    board.tick()
    second = count(board, 10.0)
    assert second == first + 1
    assert count(board, 20.0) == second


def test_what_cannot_be_looked_into_gets_on_for_a_while() -> None:
    board = warm(sees_layers=False)
    board.begin(0.0, has_work=True)
    seen = [count(board, now) for now in (0.0, 1.0, BLIND_S / 2, BLIND_S)]
    assert sorted(set(seen)) == seen
    assert count(board, 2 * BLIND_S) == seen[-1]
    board.end(2 * BLIND_S, computed=True, has_work=False)
    assert count(board, 2 * BLIND_S) > seen[-1], "it never goes back"


def test_the_first_steps_may_compile() -> None:
    board = ProgressBoard()
    board.sees_layers = True
    board.begin(0.0, has_work=True)
    assert count(board, 0.0) < count(board, 5.0) < count(board, 30.0)


def test_work_that_no_step_has_seen_is_work() -> None:
    board = warm(sees_layers=True)
    board.end(0.0, computed=True, has_work=False)
    assert not board.stamp(LOAD, 0.0, has_more=False).has_work
    assert board.stamp(LOAD, 0.0, has_more=True).has_work
    board.begin(0.0, has_work=True)
    assert board.stamp(LOAD, 0.0, has_more=False).has_work
