"""What `pdserve explain` prints of what the router says."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdserve.commands.explain_view import ExplainView
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w

WORKERS = (
    w.WorkerInfo(worker_id="p0", role=w.ROLE_PREFILL, total_blocks=100),
    w.WorkerInfo(worker_id="d0", role=w.ROLE_DECODE, total_blocks=100),
)
SCORED = a.PlacementCandidate(
    worker_id="d0",
    state="ready",
    load=w.WorkerLoad(num_running_reqs=3, num_waiting_reqs=1),
    reserved_blocks=25,
    cached_tokens=32,
    scores=[
        a.PlacementScore(phase="decode", scorer="room", weight=0.5, score=0.75),
        a.PlacementScore(phase="decode", scorer="seats", weight=0.5, score=0.5),
    ],
    totals={"decode": 0.625, "total": 0.6},
)
PASSED_OVER = a.PlacementCandidate(worker_id="p0", state="draining", why_not="draining")


def printed(*decisions: a.PlacementDecision, forgotten: int = 0) -> str:
    console = Console(file=io.StringIO(), width=160)
    view = ExplainView(console)
    for worker in WORKERS:
        view.show(a.Explained(worker=worker))
    request = a.ExplainedRequest(request_id="r[1]", decisions=decisions, forgotten=forgotten)
    view.show(a.Explained(request=request))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def decision(**changes: object) -> a.PlacementDecision:
    values = {"policy": "least_loaded", "turn": 7, "prompt_tokens": 100, "kv_tokens": 150}
    return a.PlacementDecision(candidates=[PASSED_OVER, SCORED], **{**values, **changes})


def test_a_decision_shows_scores_and_reasons() -> None:
    text = printed(decision(prefill="p0", decode="d0"))
    assert text.startswith("r[1]\n")
    assert "least_loaded, turn 7: prefill on p0, decode on d0" in text
    assert "prompt 100 tokens, KV 150 tokens" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    scores = "decode: 0.5×room 0.750 + 0.5×seats 0.500"
    assert rows["d0"] == f"d0 decode 0 25/100 3+1 0.600 {scores}".split()
    assert rows["p0"] == ["p0", "prefill", "0", "0/100", "-", "-", "draining"]
    assert "cached" not in text


def test_what_was_cached_has_a_column_where_it_was_asked() -> None:
    text = printed(decision(decode="d0", asked_prefix=True))
    assert "all on d0" in text
    assert "d0 decode 0 25/100 3+1 32 0.600" in " ".join(text.split())


def test_predictions_are_in_milliseconds() -> None:
    seconds = {"ttft_s": 0.12, "itl_harm_s": 0.004}
    predictions = [
        a.PlacementPrediction(prefill="p0", decode="d0", seconds=seconds),
        a.PlacementPrediction(decode="d0", seconds=seconds),
    ]
    text = printed(decision(decode="d0", predictions=predictions))
    assert "predicted p0 → d0: itl_harm 4.0 ms, ttft 120.0 ms" in text
    assert "predicted d0 alone: itl_harm 4.0 ms, ttft 120.0 ms" in text


def test_each_attempt_says_what_came_of_it() -> None:
    text = printed(
        decision(tried_before=4),
        decision(prefill="p0", decode="d0"),
        decision(decode="d0", cause="one_worker: d1 [died]"),
        decision(policy="", refused="no decode worker is ready"),
        forgotten=2,
    )
    assert "2 earlier decisions are no longer kept" in text
    assert "waits for room, tried 5 times" in text
    assert "placed again: one_worker: d1 [died]" in text
    assert "refused: no decode worker is ready" in text


def test_of_many_workers_the_best_are_shown_and_the_others_counted() -> None:
    candidates = [
        a.PlacementCandidate(worker_id=f"d{i}", state="ready", totals={"total": i / 100})
        for i in range(40)
    ] + [
        a.PlacementCandidate(worker_id=f"x{i}", state="ready", why_not="not drawn")
        for i in range(60)
    ]
    values = {"policy": "least_loaded", "decode": "x3", "avoid": ["y"]}
    barred = [a.ExcludedPair(prefill="p1", decode="d1")]
    many = a.PlacementDecision(candidates=candidates, excluded=barred, **values)
    lines = printed(many).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith((" d", " x"))]
    assert rows == ["x3", *(f"d{i}" for i in range(39, 16, -1))]
    assert lines[-1] == "   and 76 more: 59 not drawn, 17 scored less"
    drawn = printed(a.PlacementDecision(candidates=candidates, not_drawn=744, **values))
    assert "   744 other workers were not looked at: of a pool this large some" in drawn
    assert "looked at" not in printed(many)
    assert "   to be avoided: y, p1 with d1" in lines


@pytest.mark.parametrize(
    ("prefill", "is_habit", "said"),
    [
        ("p0", False, "last had it apart, which is not beaten clearly"),
        ("", False, "last had it apart, which is beaten clearly"),
        ("", True, "last had it on the decode worker, which is not beaten clearly"),
        ("p0", True, "last had it on the decode worker, which is beaten clearly"),
    ],
)
def test_both_ways_are_weighed_against_habit(prefill: str, is_habit: bool, said: str) -> None:
    predictions = [
        a.PlacementPrediction(
            prefill="p0", decode="d0", seconds={"cost_s": 0.012}, is_habit=not is_habit
        ),
        a.PlacementPrediction(decode="d0", seconds={"cost_s": 0.01}, is_habit=is_habit),
    ]
    text = printed(decision(prefill=prefill, decode="d0", predictions=predictions))
    costs = "cost of prefill apart 12.0 ms, on the decode worker 10.0 ms"
    assert f"{costs}; requests of this size {said}" in text
    assert "cost of" not in printed(decision(decode="d0", predictions=predictions[:1]))
    assert "cost of" not in printed(decision(predictions=predictions))
