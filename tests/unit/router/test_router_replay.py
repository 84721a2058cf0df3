"""Decisions written out, read in again, and made again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from google.protobuf import json_format

from pdserve.cli import main
from pdserve.errors import PdserveError
from pdserve.types import Role, WorkerLoad
from router.decisions.export import read_lines
from router.decisions.log import DecisionLog
from router.decisions.replay import Difference, Outcome, Replay, replay
from router.decisions.service import explained
from router.member import Charge, Member
from router.placement.context import PlacementContext, Prediction
from router.placement.policies.by_name import POLICIES
from router.placement.recompute import place_recompute
from router.placement.values import Candidate, Demand
from tests.fakes import worker_info

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)


@dataclass
class Cached:
    tokens: Mapping[str, int]

    def cached_tokens(self, _demand: Demand) -> Mapping[str, int]:
        return self.tokens


class Cost:
    """Knows all but one pair, and that a busy decode worker is slow to prefill."""

    def predict(
        self,
        _demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        _cached: Mapping[str, int],
    ) -> Prediction | None:
        first = decode if prefill is None else prefill
        if first.load is None or (prefill is not None and prefill.worker_id == "p1"):
            return None
        cost_s = 0.1 + first.load.num_running_reqs + (0.01 if prefill is None else 0.0)
        name = None if prefill is None else prefill.worker_id
        return Prediction(name, decode.worker_id, cost_s, 0.0, cost_s=cost_s, is_habit=True)


def pool() -> list[Member]:
    """Three prefill and three decode workers: the later, the busier; and some that may not."""
    found = []
    for index in range(3):
        for role in (Role.PREFILL, Role.DECODE):
            load = WorkerLoad(index, index, index / 10, 100 - 10 * index)
            info = worker_info(f"{role[0]}{index}", role)
            found.append(Member(info, lease_end=1.0, attached=True, load=load))
    blind = Member(worker_info("blind", Role.DECODE), lease_end=1.0, attached=True)
    Charge(blind, prompt_tokens=10, kv_tokens=800)
    other = worker_info("other", Role.DECODE, compatibility="another")
    leaving = worker_info("leaving", Role.PREFILL)
    return [
        *found,
        blind,
        Member(other, lease_end=1.0, attached=True),
        Member(leaving, lease_end=1.0, attached=True, draining=True),
    ]


def recorded(policy: str, context: PlacementContext | None = None) -> list[str]:
    """What `policy` decided for ten requests over that pool, as lines of JSON."""
    context = context or PlacementContext()
    log = DecisionLog(100)
    members = pool()
    for turn in range(10):
        barred = frozenset({("p0", "d0")} if turn % 2 else ())
        demand = Demand("demo", 100, 150, turn == 4, frozenset({"p1"}), barred, f"r{turn}")
        seen = [m.seen() for m in members]
        log.record(POLICIES[policy](seen, demand, turn, context), 1000.0 + turn)
    for member in members:
        Charge(member, kv_tokens=1600)
    full = [m.seen() for m in members]
    waits = Demand("demo", 100, 150, request_id="waits")
    log.record(POLICIES[policy](full, waits, 10, context), 1.0)
    log.record(place_recompute(full, DEMAND, 11, context), 1.0)
    return lines_of(log)


def lines_of(log: DecisionLog) -> list[str]:
    messages = list(explained(log.all()))
    return [
        json_format.MessageToJson(m, preserving_proto_field_name=True, indent=None) + "\n"
        for m in messages
    ]


def again(lines: list[str], policy: str) -> Replay:
    return replay(read_lines(lines, "lines"), policy, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_that_decided_decides_the_same_again(policy: str) -> None:
    context = PlacementContext(Cached({"p2": 96, "d1": 32}), Cost())
    lines = recorded(policy, context)
    assert ('"predictions"' in "".join(lines)) == (policy == "slo_aware")
    found = again(lines, policy)
    assert (found.decisions, found.recomputes) == (11, 1)
    assert found.differences == []
    assert (found.without_cached, found.without_prediction) == (0, 0)
    assert found.recorded_by_worker == found.replayed_by_worker != {}


def test_another_policy_differs_where_it_decides_otherwise() -> None:
    found = again(recorded("least_loaded"), "round_robin")
    assert found.same + len(found.differences) == found.decisions == 11
    by_request = {x.request_id: x for x in found.differences}
    assert by_request["r2"] == Difference(
        "r2", 2, "least_loaded", Outcome("p0", "d0"), Outcome("p0", "d2")
    )
    assert "waits" not in by_request, "both waited"
    assert found.recorded_by_worker["d2"] == 0 < found.replayed_by_worker["d2"]


def test_what_was_not_asked_then_is_said() -> None:
    found = again(recorded("least_loaded"), "prefix_aware")
    assert found.without_cached == 11


def test_what_was_not_predicted_then_is_said() -> None:
    assert again(recorded("prefix_aware"), "slo_aware").without_prediction > 0


def test_what_was_cached_is_given_again() -> None:
    context = PlacementContext(Cached({"p2": 100}))
    log = DecisionLog(10)
    members = [m.seen() for m in pool()]
    decision = POLICIES["prefix_aware"](members, DEMAND, 0, context)
    assert decision.placement is not None
    assert decision.placement.prefill is not None
    assert decision.placement.prefill.worker_id == "p2"
    log.record(decision, 1.0)
    assert again(lines_of(log), "prefix_aware").differences == []
    (difference,) = again(lines_of(log), "least_loaded").differences
    assert difference.recorded == Outcome("p2", "d0")
    assert difference.replayed == Outcome("p0", "d0")


def test_what_was_demanded_is_read_as_it_was_written() -> None:
    demand = Demand(
        "demo",
        100,
        310,
        avoid=frozenset({"p1"}),
        barred=frozenset({("p0", "d0")}),
        request_id="r",
        forks=2,
        fork_tokens=80,
    )
    log = DecisionLog(10)
    members = [m.seen() for m in pool()]
    log.record(POLICIES["least_loaded"](members, demand, 7, PlacementContext()), 1.0)
    (given,) = read_lines(lines_of(log), "lines")
    assert (given.demand, given.turn) == (demand, 7)
    for before, after in zip(members, given.candidates, strict=True):
        for name in Candidate.__slots__:
            assert getattr(after, name) == getattr(before, name), name


def test_a_worker_is_said_once_before_the_decisions_that_name_it() -> None:
    said = [json.loads(line) for line in recorded("least_loaded")]
    workers = [x["worker"]["worker_id"] for x in said if "worker" in x]
    assert sorted(workers) == sorted({m.worker_id for m in pool()})
    assert "worker" in said[0]
    assert "request" in said[-1]


def test_those_passed_over_have_a_reason() -> None:
    said = [json.loads(line) for line in recorded("least_loaded")]
    (decision,) = next(x for x in said if x.get("request", {}).get("request_id") == "r0")[
        "request"
    ]["decisions"]
    reasons = {c["worker_id"]: c.get("why_not") for c in decision["candidates"]}
    assert reasons == {
        **dict.fromkeys(("p0", "d0", "d1", "d2", "p2", "blind")),
        "p1": "to be avoided",
        "other": "no prefill worker can hand KV to it",
        "leaving": "draining",
    }
    scored = next(c for c in decision["candidates"] if c["worker_id"] == "d0")
    assert {s["scorer"]: s["weight"] for s in scored["scores"]} == {"room": 0.5, "seats": 0.5}
    assert set(scored["totals"]) == {"decode", "total"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "lines, line 2: "),
        ('{"request": {"decisions": [{"candidates": [{"worker_id": "x"}]}]}}', "worker x is not"),
        ('{"worker": {"worker_id": "x"}}', "lines, line 2: worker"),
        ('{"surprise": 1}', "lines, line 2: .*surprise"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_line(line: str, message: str) -> None:
    with pytest.raises(PdserveError, match=message):
        list(read_lines(["\n", line], "lines"))


def test_the_command_says_where_the_two_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(recorded("least_loaded")), encoding="utf-8")
    assert main(["replay-decisions", str(path), "--policy", "round_robin"]) == 0
    shown = capsys.readouterr().out
    assert "of 11 decisions are the same by round_robin" in shown
    assert "p0 → d2" in shown
    assert main(["replay-decisions", str(path), "--policy", "round_robin", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] + len(found["differences"]) == found["decisions"] == 11
    assert found["replayed_by_worker"]["d2"] > 0
    assert main(["replay-decisions", str(tmp_path / "none"), "--policy", "round_robin"]) == 1
    assert "cannot read" in capsys.readouterr().err
