"""What `pdserve replay` asks, and what it says of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.cli.replay import (
    Repeated,
    body_of,
    compared,
    not_repeatable,
    show,
    verdict_of,
)
from pdserve.observe.capsules import (
    Capsule,
    CapsuleAnswer,
    CapsuleHeader,
    CapsuleSpan,
    CapsuleStream,
)

SENT = [5, 6, 7, 8]
RECEIPT = {"prefill_worker": "p", "decode_worker": "d", "transport": "tcp"}


def capsule(answer: CapsuleAnswer | None = None, **changes: Any) -> Capsule:
    given: dict[str, Any] = {
        "header": CapsuleHeader(request_id="r", model="m"),
        "prompt_tokens": 30,
        "prompt": [*range(30)],
        "sampling": {"temperature": 0.0, "seed": None, "max_tokens": 4, "logit_bias": {"3": 1.0}},
        "answers": [answer or CapsuleAnswer(tokens=SENT, finish_reason="length")],
        "workers": {"p": {"block_size": 16}, "d": {"block_size": 16}},
    }
    return Capsule(**{**given, **changes})


def repeated(tokens: list[int], *, of: Capsule | None = None, **receipt: str) -> Repeated:
    return compared(of or capsule(), {0: tokens}, {**RECEIPT, **receipt}, {})


@pytest.mark.parametrize(
    ("tokens", "token", "got", "want"),
    [
        ([5, 6, 9, 8], 2, 9, 7),
        ([5, 6], 2, None, 7),
        ([*SENT, 1], 4, 1, None),
        ([], 0, None, 5),
    ],
)
def test_the_first_token_that_differs_is_found(
    tokens: list[int], token: int, got: int | None, want: int | None
) -> None:
    found = repeated(tokens).difference
    assert found is not None
    assert (found.token, found.got, found.want) == (token, got, want)


def test_of_an_answer_that_was_cut_the_tokens_sent_are_compared() -> None:
    cut = capsule(CapsuleAnswer(tokens=SENT[:2]))
    assert repeated([*SENT, 9], of=cut).result == "same"
    assert repeated([5], of=cut).result == "different"


def test_the_expected_answer_is_what_counts() -> None:
    wrong = CapsuleAnswer(
        tokens=[5, 1], finish_reason="length", expected=SENT, spans=[CapsuleSpan("d", 1, 2, "p")]
    )
    found = verdict_of(capsule(wrong), [repeated(SENT, of=capsule(wrong))])
    assert (found.result, found.compared_with, found.worker) == ("same", "expected", "d")
    text = "in the incident token 1 of answer 0 was wrong; d sampled it with KV from p"
    assert found.points_to == [text]


def test_of_a_part_of_the_expected_answer_only_that_part_counts() -> None:
    answer = CapsuleAnswer(
        tokens=[5, 1, 1, 1],
        finish_reason="length",
        spans=[CapsuleSpan("d", 0, 4)],
        expected=SENT[:2],
        expected_is_part=True,
    )
    of = capsule(answer)
    found = verdict_of(of, [repeated([*SENT, 3], of=of)])
    assert (found.result, found.tokens, found.worker) == ("same", 2, "d")
    assert repeated([5, 1], of=of).difference is not None


def test_a_worker_that_died_in_the_incident_is_named() -> None:
    stream = CapsuleStream(worker="d", instance="i", role="decode", side="decode", died=True)
    cut = capsule(CapsuleAnswer(tokens=SENT[:2], streams=[stream, stream]))
    found = verdict_of(cut, [repeated(SENT, of=cut)])
    assert found.points_to == ["in the incident d died while it ran the request"]


def test_the_worker_that_only_wrong_answers_used_is_named() -> None:
    replays = [repeated([5, 6, 9, 8]), repeated(SENT, decode_worker="d2")]
    found = verdict_of(capsule(), replays)
    assert (found.result, found.worker, found.blocks) == ("different", "d", "1-1")
    first = "worker d: all 1 answers that differ used it, and none of 1 that are the same"
    assert found.points_to[0] == f"{first}, and it sampled the token"


def test_a_link_is_named_if_both_of_its_workers_are_sound() -> None:
    replays = [
        repeated([5, 9, 7, 8]),
        repeated(SENT, decode_worker="d2"),
        repeated(SENT, prefill_worker="p2"),
    ]
    found = verdict_of(capsule(), replays)
    assert found.points_to[0].startswith("the link p to d:")
    moved = "token 1 was sampled from KV of the blocks 0-1, of which 0-1 came from p over tcp"
    assert found.points_to[1] == moved


def test_the_first_token_points_to_the_worker_of_the_prompt() -> None:
    found = verdict_of(capsule(), [repeated([9, 6, 7, 8])])
    assert (found.worker, found.blocks) == ("p", "0-1")


def test_failures_and_near_ties_are_no_difference() -> None:
    failed = Repeated(result="fails", error="worker_failed: it died")
    assert verdict_of(capsule(), [repeated(SENT), failed]).result == "fails"
    assert verdict_of(capsule(), [repeated(SENT), Repeated(result="undecided")]).result == (
        "undecided"
    )
    header = CapsuleHeader(request_id="r", model="m", code="worker_failed")
    found = verdict_of(capsule(header=header), [failed])
    assert found.points_to[-1] == "the failure repeats: worker_failed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": None}, "it has no prompt"),
        ({"sampling": {"temperature": 0.7, "seed": -1}}, "without a seed"),
        ({"unlike": ["the prompt has images"]}, "images"),
        ({"answers": [CapsuleAnswer(tokens=[])]}, "no token was sent"),
        (
            {"sampling": {"temperature": 0, "structured_output": {"kind": "structural_tag"}}},
            "structural_tag",
        ),
    ],
)
def test_what_cannot_be_repeated_is_said(changes: dict[str, Any], reason: str) -> None:
    assert reason in not_repeatable(capsule(**changes))[0]
    assert not_repeatable(capsule()) == []


@pytest.mark.parametrize(
    ("constraint", "sent"),
    [
        ({"kind": "json_schema", "value": "{}"}, {"json": "{}"}),
        ({"kind": "json_object", "value": ""}, {"json_object": True}),
        ({"kind": "choice", "value": "", "choices": ["a"]}, {"choice": ["a"]}),
        ({"kind": "regex", "value": "a+"}, {"regex": "a+"}),
    ],
)
def test_a_request_has_the_names_of_the_api(
    constraint: dict[str, Any], sent: dict[str, Any]
) -> None:
    sampling = {"temperature": 0.0, "seed": None, "logprobs": 3, "structured_output": constraint}
    body = body_of(capsule(sampling=sampling), "other")
    params = {"temperature": 0.0, "structured_outputs": sent}
    assert body == {"model": "other", "token_ids": [*range(30)], "sampling_params": params}


def test_the_output_has_a_line_for_each_replay(capsys: pytest.CaptureFixture[str]) -> None:
    show(verdict_of(capsule(), [repeated(SENT), repeated([5, 6])]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "different: request r, 4 sent tokens; at token 2 of answer 0: the end instead of 7"
    )
    assert lines[1:3] == ["  replay 1: same (p to d)", "  replay 2: different at token 2 (p to d)"]
