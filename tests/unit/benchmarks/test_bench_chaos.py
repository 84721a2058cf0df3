"""What chaos counts: wrong tokens, allowed failures, and whether a scenario passed."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks.chaos.capsules import keep_capsules
from benchmarks.chaos.hooks import (
    COPIES,
    DIRECTORY,
    PRODUCERS,
    copy_always,
    environment,
    give,
    hits,
    patch,
)
from benchmarks.chaos.load import (
    KINDS,
    ObservedAnswer,
    ObservedChoice,
    Question,
    make_questions,
    wrong_tokens,
)
from benchmarks.chaos.matrix import ChaosSettings, Row
from benchmarks.chaos.scenarios import REPEATED, MissedError, Run, abort
from benchmarks.chaos.storms import STORMS
from benchmarks.commands import _chosen
from benchmarks.errors import BenchError
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.observe.capsules import (
    Capsule,
    CapsuleAnswer,
    CapsuleHeader,
    CapsuleSpan,
    seal,
    unseal,
)
from pdserve.types import SamplingParams
from router.placement import cost
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def answer(
    tokens: list[int], text: str = "abc", ending: Any = "ok", finish: str = "length", **more: Any
) -> ObservedAnswer:
    choice = ObservedChoice(
        token_ids=tokens, text=text, finish=finish, logprobs=more.pop("logprobs", [])
    )
    count = more.pop("count", len(tokens))
    return ObservedAnswer(
        1, 0.0, ending=ending, choices={0: choice}, completion_tokens=count, **more
    )


WANT = answer([1, 2, 3], logprobs=[-0.5, -0.5, -0.5])


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (answer([1, 2, 3], logprobs=[-0.5, -0.5, -0.5]), 0),
        (answer([1, 9, 3], logprobs=[-0.5, -0.5, -0.5]), 1),
        (answer([1, 2], logprobs=[-0.5, -0.5, -0.5]), 2),
        (answer([1, 2, 3], logprobs=[-0.5, -0.5, -0.7]), 1),
        (answer([1, 2, 3], text="abd", logprobs=[-0.5] * 3), 1),
        (answer([1, 2, 3], finish="stop", logprobs=[-0.5] * 3), 1),
        (answer([1, 2], "ab", "failed", ""), 0),
        (answer([1, 9], "ab", "failed", ""), 1),
        (answer([1, 2, 3, 4], "abc", "failed", ""), 1),
        (answer([], "x", "aborted", ""), 1),
    ],
)
def test_wrong_tokens_are_counted(got: ObservedAnswer, wrong: int) -> None:
    assert wrong_tokens(got, WANT) == wrong


def run_of(questions: list[Question], clients: object = None) -> Run:
    by_number = {x.number: x for x in questions}
    return Run(cast("Any", None), cast("Any", clients), by_number, 1000.0, random.Random(0))


def test_only_requests_hit_by_a_fault_may_fail() -> None:
    run = run_of([])
    run.struck_s, run.workers_s, run.allowed = 10.0, 20.0, {1}
    assert run.allows(ObservedAnswer(1, 5.0, heard_s=6.0))
    clean = ObservedAnswer(2, 15.0, heard_s=16.0, code=Unavailable.code)
    assert run.allows(clean)
    assert not run.allows(replace(clean, sent_s=21.0, heard_s=22.0))
    assert not run.allows(replace(clean, heard_s=9.0))
    assert not run.allows(replace(clean, code=InvalidRequest.code))


def test_a_row_passes_if_the_fault_struck_and_nothing_was_lost() -> None:
    row = Row(
        fault="kill_decode",
        what="",
        hit=True,
        requests=3,
        failed=0,
        allowed_failures=2,
        wrong_tokens=0,
        leaked_blocks=0,
        left=[],
        pause_s=0.1,
        whole_s=1.0,
    )
    assert row.passed
    bad: list[dict[str, Any]] = [{"left": ["process 7"]}, {"hit": False}, {"deaths": ["decode-0"]}]
    bad += [{name: 1} for name in ("failed", "wrong_tokens", "leaked_blocks")]
    for changes in bad:
        assert not replace(row, **changes).passed
    assert {"fault", "failed", "wrong_tokens", "leaked_blocks", "passed"} <= row.to_json().keys()


class KeepsCapsules:
    """A service whose router has some capsules."""

    def __init__(self, capsules: Mapping[str, Capsule]) -> None:
        self.ready = {"model": "m"}
        self._capsules = capsules

    async def capsule(self, request_id: str) -> bytes | None:
        found = self._capsules.get(request_id)
        return None if found is None else seal(found)


async def test_each_bad_answer_leaves_a_capsule_with_the_right_one(tmp_path: Path) -> None:
    of_router = Capsule(
        header=CapsuleHeader(request_id="gen-a", model="m", reason="failure"),
        prompt_tokens=2,
        prompt=[1, 2],
        sampling={"temperature": 0.0},
        answers=[CapsuleAnswer(tokens=[1, 9], spans=[CapsuleSpan("d", 0, 2)])],
    )
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    models = {1: "", 2: "lora"}
    run = run_of([Question(n, "greedy", (1, 2), sampling, model) for n, model in models.items()])
    run.service = cast("Any", KeepsCapsules({"a": of_router}))
    known = answer([1, 9], "a", "failed", "", request_id="a")
    # Its router was killed, or it is a line of a batch.
    unknown = replace(known, number=2 + REPEATED, request_id="", error="died", code="unavailable")
    files = await keep_capsules(
        "kill", run, [known, unknown], {1: WANT, 2: WANT}, tmp_path / "capsules"
    )
    assert [x.rpartition("/")[2] for x in files] == ["kill-1.capsule", "kill-1000002.capsule"]
    one, other = (unseal((tmp_path / x).read_bytes()) for x in files)
    assert [x.header.reason for x in (one, other)] == ["chaos", "chaos"]
    assert [x.header.model for x in (one, other)] == ["m", "lora"]
    assert one.answers[0].spans == of_router.answers[0].spans
    assert (other.prompt, other.sampling["max_tokens"], other.message) == ([1, 2], 3, "died")
    for capsule in (one, other):
        assert [(x.tokens, x.expected) for x in capsule.answers] == [([1, 9], [1, 2, 3])]
    known.choices[0].token_ids = [4]
    (file,) = await keep_capsules("kill", run, [known], {1: WANT}, tmp_path)
    assert "the client received other tokens" in unseal((tmp_path / file).read_bytes()).message


def test_questions_share_no_prompt_and_have_every_feature() -> None:
    def questions(first: int) -> list[Question]:
        return make_questions(18, seed=1, vocab_size=2048, kinds=list(KINDS), first=first)

    first, more = questions(0), questions(18)
    assert {x.kind for x in first} == KINDS.keys()
    assert len({x.prompt for x in first + more}) == 36
    assert first == questions(0)


def test_questions_rotate_through_adapters_and_sessions() -> None:
    made = make_questions(
        8, seed=1, vocab_size=2048, kinds=["greedy", "n"], first=0, models=("", "a"), sessions=3
    )
    assert [x.model for x in made] == ["", "", "a", "a"] * 2
    assert len({x.session for x in made}) == 3


class Streaming:
    """Clients whose answers get all their tokens at once, and end after `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def ask(self, question: Question, found: ObservedAnswer) -> None:
        try:
            found.choices[0] = ObservedChoice(list(range(question.sampling.max_tokens or 0)))
            await self.release.wait()
        except asyncio.CancelledError:
            found.end("aborted")
            raise
        found.end("ok")


async def test_clients_leave_at_points_of_their_answers_and_come_back() -> None:
    clients, sampling = Streaming(), SamplingParams(max_tokens=24)
    run = run_of([Question(n, "greedy", (1,), sampling) for n in range(40)], clients)
    loading, leaving = asyncio.create_task(run.load()), asyncio.create_task(abort(run))
    await wait_until(lambda: len(run.points) >= 15)
    clients.release.set()
    await asyncio.gather(loading, leaving)
    assert sum(run.aborts.values()) == len(run.allowed) >= 15
    assert {run.answers[n].ending for n in run.points} == {"aborted"}
    assert any(number >= REPEATED for number in run.answers)


async def test_a_storm_in_which_nobody_left_proves_nothing() -> None:
    clients = Streaming()
    clients.release.set()
    run = run_of([Question(1, "greedy", (1,), SamplingParams())], clients)
    await run.load()
    with pytest.raises(MissedError, match="before its client left"):
        await abort(run)


def test_every_storm_is_a_valid_configuration(tmp_path: Path) -> None:
    for storm in STORMS.values():
        settings = ChaosSettings(models=tmp_path)
        made = settings.config((*storm.model, *storm.config), tmp_path)
        assert "{" not in str(made["worker"]["model"])
        assert made["worker"]["kv"]["tiers"]["disk_path"] in ("", f"{tmp_path}/tier")
        assert set(storm.kinds) <= set(KINDS)


def test_a_storm_without_its_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "eagle").mkdir()
    chosen, not_run = _chosen("storms", ChaosSettings(models=tmp_path))
    assert "storm_eagle" in {x.name for x in chosen}
    assert not_run["storm_mla"] == "no DeepSeek-V2 in --models"
    assert {x.name for x in chosen} | set(not_run) == set(STORMS)
    with pytest.raises(BenchError, match="needs --engine vllm"):
        _chosen("storm_base", ChaosSettings(engine="fake"))
    with pytest.raises(BenchError, match="no scenario 'storm_x'"):
        _chosen("storm_x", ChaosSettings())


def test_copies_are_made_whatever_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert COPIES not in environment(tmp_path)
    assert COPIES in environment(tmp_path, copies_always=True)
    monkeypatch.setattr(cost, "is_clearly_cheaper", cost.is_clearly_cheaper)
    copy_always(cast("Any", None))
    assert cost.is_clearly_cheaper(2.0, 1.0)


async def test_a_request_that_is_sent_again_has_another_number() -> None:
    class Instant:
        async def ask(self, question: Question, found: ObservedAnswer) -> None:
            found.end("ok")

    run = run_of([Question(n, "greedy", (1,), SamplingParams()) for n in (4, 5)], Instant())
    run.send(4)
    run.send(4, slow_s=0.1)
    assert run.answers[4 + REPEATED].slow_s == 0.1
    await run.load()
    assert run.is_over
    assert {n % REPEATED for n in run.answers} == {4, 5}


@pytest.mark.parametrize("name", PRODUCERS)
def test_a_link_breaks_as_ordered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(name)
    producer = getattr(module, PRODUCERS[name])
    monkeypatch.setattr(producer, "send", producer.send)
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    patch(module)
    give(tmp_path, os.getpid(), "drop")
    with pytest.raises(ConnectionAbortedError, match="as ordered"):
        producer.send(None, None, [1], None)
    assert hits(tmp_path, os.getpid()) == 1
