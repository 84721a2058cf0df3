"""The output of `pdserve explain`."""

from __future__ import annotations

import io

from rich.console import Console

from pdserve.cli.explain import show
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w

SCORED = a.PlacementCandidate(
    worker_id="d0",
    role=w.ROLE_DECODE,
    total_blocks=100,
    state="ready",
    load=w.WorkerLoad(num_running_reqs=3, num_waiting_reqs=1),
    reserved_blocks=25,
    cached_tokens=32,
    scores=[
        a.PlacementScore(phase="decode", scorer="room", weight=0.5, score=0.75),
        a.PlacementScore(phase="decode", scorer="slots", weight=0.5, score=0.5),
    ],
    totals={"decode": 0.625, "total": 0.6},
)
PASSED_OVER = a.PlacementCandidate(
    worker_id="p0", role=w.ROLE_PREFILL, total_blocks=100, state="draining", why_not="draining"
)


def printed(*decisions: a.PlacementDecision) -> str:
    console = Console(file=io.StringIO(), width=160)
    request = a.ExplainedRequest(request_id="r[1]", decisions=decisions)
    show(request, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def decision(**changes: object) -> a.PlacementDecision:
    values = {"policy": "least_loaded", "prompt_tokens": 100, "kv_tokens": 150}
    return a.PlacementDecision(candidates=[PASSED_OVER, SCORED], **{**values, **changes})


def test_labels_are_shown_where_a_worker_has_them() -> None:
    near = a.PlacementCandidate()
    near.CopyFrom(SCORED)
    near.topology.update(region="eu", zone="a")
    told = a.PlacementDecision(decode="d0", candidates=[PASSED_OVER, near])
    rows = {x.split()[0]: x.split() for x in printed(told).splitlines() if x.strip()}
    assert rows["d0"][1:4] == ["decode", "eu/a", "0"]
    assert "where" not in printed(decision(decode="d0"))


def test_a_decision_shows_scores_reasons_and_predictions() -> None:
    predictions = [
        a.PlacementPrediction(prefill="p0", decode="d0", seconds={"ttft_s": 0.12}),
        a.PlacementPrediction(decode="d0", seconds={"ttft_s": 0.2}),
    ]
    text = printed(decision(prefill="p0", decode="d0", asked_prefix=True, predictions=predictions))
    assert text.startswith("r[1]\n")
    assert "least_loaded: prefill on p0, decode on d0" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    scores = "decode: 0.5×room 0.750 + 0.5×slots 0.500"
    assert rows["d0"] == f"d0 decode 0 25/100 3+1 32 0.600 {scores}".split()
    assert rows["p0"] == ["p0", "prefill", "0", "0/100", "-", "0", "-", "draining"]
    assert "predicted p0 → d0: ttft 120.0 ms" in text
    assert "predicted aggregated on d0: ttft 200.0 ms" in text


def test_each_attempt_shows_its_outcome() -> None:
    text = printed(
        decision(),
        decision(decode="d0", cause="aggregated: d1 [died]"),
        decision(policy="", refused="no ready decode worker"),
    )
    for part in (
        "waits for capacity",
        "placed again: aggregated: d1 [died]",
        "rejected: no ready decode worker",
    ):
        assert part in text


def test_of_many_workers_the_best_are_shown_and_the_others_counted() -> None:
    candidates = [
        a.PlacementCandidate(worker_id=f"d{i}", role=w.ROLE_DECODE, totals={"total": i / 100})
        for i in range(40)
    ]
    lines = printed(a.PlacementDecision(candidates=candidates, decode="d3")).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("d")]
    assert rows == ["d3", *(f"d{i}" for i in range(39, 16, -1))]
    assert lines[-1] == "   and 16 more: 16 lower score"
