"""What chaos counts: wrong tokens, allowed failures, and whether a scenario passed."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks.chaos.hooks import PATCHES
from benchmarks.chaos.load import (
    KINDS,
    REPEATED,
    Answer,
    Choice,
    Load,
    Question,
    make_questions,
    wrong_tokens,
)
from benchmarks.chaos.matrix import ChaosSettings, Row
from benchmarks.chaos.scenarios import SCENARIOS, Run
from pdserve.config import load_config
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.chaos.load import Asker
    from benchmarks.chaos.service import ServiceUnderTest


def answer(
    tokens: list[int], text: str = "abc", ending: Any = "ok", finish: str = "length", **more: Any
) -> Answer:
    choice = Choice(token_ids=tokens, text=text, finish=finish, logprobs=more.pop("logprobs", []))
    count = more.pop("count", len(tokens))
    return Answer(1, 0.0, ending=ending, choices={0: choice}, completion_tokens=count, **more)


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
        (answer([], "x", "aborted", ""), 1),
    ],
)
def test_wrong_tokens_are_counted(got: Answer, wrong: int) -> None:
    assert wrong_tokens(got, WANT) == wrong


def test_only_what_a_fault_ends_may_fail() -> None:
    nothing = cast("ServiceUnderTest", None), Load([], cast("Asker", None), 1.0)
    run = Run(*nothing, random.Random(0), struck_s=10.0, allowed={1}, workers_s=20.0)
    assert run.allows(Answer(1, 5.0, ended_s=6.0))
    clean = replace(Answer(2, 15.0, ended_s=16.0), code=Unavailable.code)
    assert run.allows(clean)
    assert not run.allows(replace(clean, sent_s=21.0, ended_s=22.0))
    assert not run.allows(replace(clean, ended_s=9.0))
    assert not run.allows(replace(clean, code=InvalidRequest.code))


def row(**changes: Any) -> Row:
    whole = Row(
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
    return replace(whole, **changes)


def test_a_row_passes_if_the_fault_struck_and_nothing_was_lost() -> None:
    assert row().passed
    for name in ("failed", "wrong_tokens", "leaked_blocks"):
        assert not row(**{name: 1}).passed
    assert not row(left=["process 7"]).passed
    assert not row(hit=False).passed
    assert {"fault", "failed", "wrong_tokens", "leaked_blocks", "passed"} <= row().to_json().keys()


def test_questions_share_no_prompt_and_have_every_feature() -> None:
    first = make_questions(16, seed=1, vocab_size=2048, engine="fake", first=0)
    more = make_questions(16, seed=1, vocab_size=2048, engine="fake", first=16)
    assert {x.kind for x in first} == KINDS.keys() - {"structured"}
    assert len({x.prompt for x in first + more}) == 32
    assert first == make_questions(16, seed=1, vocab_size=2048, engine="fake", first=0)


async def test_a_load_sends_again_under_another_number() -> None:
    class Instant:
        async def ask(self, question: Question, found: Answer, *, slow_s: float = 0.0) -> None:
            found.end("ok")

    questions = [Question(n, "greedy", (1,), SamplingParams()) for n in (4, 5)]
    load = Load(questions, cast("Asker", Instant()), 1000.0)
    load.send(4)
    load.send(4, slow_s=0.1)
    assert load.unsent == 1
    assert load.slow == {4 + REPEATED}
    await load.run()
    assert load.is_over
    assert {n % REPEATED for n in load.answers} == {4, 5}


@pytest.mark.parametrize("engine", ["fake", "vllm"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_configuration_is_valid(engine: str, name: str, tmp_path: Path) -> None:
    import yaml

    settings = ChaosSettings(engine=engine)
    hash(SCENARIOS[name].config)  # scenarios with the same one share a service
    for config in (settings.config(SCENARIOS[name].config), settings.reference()):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        assert load_config(path, {}).worker.engine == engine


@pytest.mark.parametrize("name", PATCHES)
def test_every_fault_finds_what_it_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(name)
    changed = {**vars(module)}
    for cls in [x for x in changed.values() if isinstance(x, type) and x.__module__ == name]:
        for attribute in vars(cls).keys() & {"send", "_pause"}:
            monkeypatch.setattr(cls, attribute, getattr(cls, attribute))
    for attribute in changed.keys() & {"_answer", "LONGEST_PAUSE_S"}:
        monkeypatch.setattr(module, attribute, changed[attribute])
    PATCHES[name](module)
