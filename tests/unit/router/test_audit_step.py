"""Which answers are audited, and when an audit calls two answers the same."""

from __future__ import annotations

from math import nan
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve.config import AuditConfig
from pdserve.types import (
    GenerateRequest,
    MediaItem,
    ModelWeights,
    PositionLogprobs,
    Receipt,
    Role,
    SamplingParams,
    TokenLogprob,
)
from router.attempt.answer import AnswerDelta, Discard
from router.attempt.handoff import Side
from router.attempt.placer import Charge
from router.attempt.streams import Answer, Fetched, WorkerStream
from router.attempt.suspects import Suspicion
from router.control.audits import FORGET_S, AuditSuspects, compare
from router.fleet.member import Member
from router.steps.audit import AuditQueue, AuditStep, Hop, audited, kinds_of, why_not
from router.walk import Answered, RequestRecord, Walk
from tests.support.placement import worker_info

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIR = ("p", "d")
ASKED = GenerateRequest("r", "m", (1, 2, 3), SamplingParams(max_tokens=8, temperature=0.0))


def scores(*gaps: float) -> list[PositionLogprobs]:
    """Return logprobs of the tokens 0, 1, ..., each with this distance to the likeliest, 99."""
    best = TokenLogprob(99, "", -1.0, 1)
    return [
        PositionLogprobs(TokenLogprob(i, "", -1.0 - gap, 1 + (gap > 0)), (best,))
        for i, gap in enumerate(gaps)
    ]


class TestCompare:
    @pytest.mark.parametrize(
        ("gaps", "at", "near_ties"),
        [
            ([0.0, 0.0], None, (0, 0.0)),
            ([0.0, 0.25, 0.5], None, (2, 0.5)),
            ([0.25, 0.75, 0.0], 1, (1, 0.25)),
            ([0.0, 0.0, 3.0], 2, (0, 0.0)),
            ([0.0, nan], 1, (0, 0.0)),
        ],
    )
    def test_a_token_differs_beyond_the_margin(
        self, gaps: list[float], at: int | None, near_ties: tuple[int, float]
    ) -> None:
        found = compare(range(len(gaps)), scores(*gaps), 0.5)
        assert (found.at, (found.near_ties, found.widest)) == (at, near_ties)
        assert found.compared == len(gaps)
        assert found.expected == (0 if at is None else 99)

    def test_tokens_of_the_client_are_not_compared(self) -> None:
        found = compare(range(3), scores(3.0, 0.0, 0.0), 0.5, first=1)
        assert (found.at, found.compared) == (None, 2)

    @pytest.mark.parametrize("tokens", [[0], [0, 2], [0, 1, 2]])
    def test_logprobs_of_other_tokens_are_refused(self, tokens: list[int]) -> None:
        with pytest.raises(ValueError, match="not those of the answer"):
            compare(tokens, scores(0.0, 0.0), 0.5)


class TestSuspects:
    def test_the_second_difference_of_a_pair_ejects_it(self) -> None:
        suspects, place = AuditSuspects(), Hop(1, PAIR, PAIR)
        assert suspects.add("m", place, 0.0) == (None, ())
        assert suspects.add("m", place, 1.0) == (PAIR, ())
        assert suspects.by_model(1.0) == {"m": {"p and d": 2}}

    def test_a_worker_is_ejected_for_differences_in_two_pairs(self) -> None:
        suspects, other = AuditSuspects(), ("p", "d2")
        suspects.add("m", Hop(1, PAIR, PAIR), 0.0)
        assert suspects.add("m", Hop(1, other, other), 0.0) == (None, ("p",))

    def test_a_worker_is_ejected_for_two_differences_alone(self) -> None:
        suspects, place = AuditSuspects(), Hop(0, ("a",), None)
        assert suspects.add("m", place, 0.0) == (None, ())
        assert suspects.add("m", place, 0.0) == (None, ("a",))

    def test_a_difference_is_forgotten(self) -> None:
        suspects, place = AuditSuspects(), Hop(0, ("a",), None)
        suspects.add("m", place, 0.0)
        assert suspects.by_model(FORGET_S) == {}
        assert suspects.add("m", place, FORGET_S) == (None, ())


def member(name: str, role: Role = Role.AGGREGATED) -> Member:
    return Member(worker_info(name, role))


def stream(
    of: Member, side: Side = Side.DECODE, pair: tuple[str, str] | None = None, start: int = 0
) -> WorkerStream:
    return WorkerStream(side, of, Charge(of), pair, "", from_token=start, weights=ModelWeights())


def answer(*streams: WorkerStream, tokens: Sequence[int] = (5, 6, 7, 8)) -> Answer:
    return Answer(Discard(), 8, list(tokens), streams=list(streams or [stream(member("a"))]))


class TestChoice:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"temperature": 0.5}, "sampled"),
            ({"min_tokens": 2}, "shaped"),
            ({"presence_penalty": 0.1}, "shaped"),
            ({"repetition_penalty": 1.1}, "shaped"),
            ({"logit_bias": {1: 1.0}}, "shaped"),
            ({"stop": ("x",), "ignore_eos": True, "top_p": 0.5, "logprobs": 2}, ""),
        ],
    )
    def test_only_the_likeliest_tokens_can_be_audited(
        self, changes: dict[str, Any], reason: str
    ) -> None:
        values = {"max_tokens": 8, "temperature": 0.0} | changes
        request = structs.replace(ASKED, sampling=SamplingParams(**values))
        assert why_not(request, answer(), 7) == reason

    def test_what_else_cannot_be_audited(self) -> None:
        image = structs.replace(ASKED, media=(MediaItem("image", "h", 0, 1),))
        assert why_not(image, answer(), 7) == "media"
        assert why_not(ASKED, answer(), 6) == "length"
        assert why_not(structs.replace(ASKED, resume=(5, 6, 7, 8)), answer(), 7) == "length"
        other = stream(member("b"), start=2)
        other.weights = ModelWeights(1)
        assert why_not(ASKED, answer(stream(member("a")), other), 7) == "weights"

    def test_what_may_have_gone_wrong(self) -> None:
        plain = answer()
        assert list(kinds_of(ASKED, plain, Receipt())) == []
        moved = answer(stream(member("d"), pair=PAIR))
        moved.retries = ["pair:moved"]
        request = structs.replace(ASKED, resume=(5,))
        found = kinds_of(request, moved, Receipt(cached_tokens=16, fetched_tokens=16))
        assert list(found) == ["handed_over", "retried", "copied", "cached", "resumed"]

    def test_each_token_has_the_workers_that_may_have_made_it_wrong(self) -> None:
        p, d, a = member("p", Role.PREFILL), member("d", Role.DECODE), member("a")
        made = answer(
            stream(p, Side.PREFILL, PAIR), stream(d, Side.DECODE, PAIR), stream(a, start=3)
        )
        found = audited(ASKED, made, ())
        alone = Hop(0, ("p",), None)
        assert [found.hop_of(i) for i in range(4)] == [
            alone,
            Hop(1, PAIR, PAIR),
            Hop(1, PAIR, PAIR),
            Hop(3, ("a",), None),
        ]
        assert found.workers == {"p", "d", "a"}
        made.fetched = Fetched("holder", [], 0.1, tokens=16, blocks=1)
        copied = ("holder", "p")
        assert audited(ASKED, made, ()).hop_of(0) == Hop(0, copied, copied)


class Step:
    """The step, with a random generator of its own."""

    def __init__(self, config: AuditConfig) -> None:
        self.queue, self.skipped = AuditQueue(config.max_waiting), 0
        self._step = AuditStep(config, self.queue, self._count, lambda: 0.0, Random(1).random)

    def _count(self, *_: str) -> None:
        self.skipped += 1

    async def serve(self, made: Answer, request: GenerateRequest = ASKED) -> None:
        async def proceed(_: Walk) -> Answered:
            return Answered([made], AnswerDelta(), receipt=Receipt())

        record = RequestRecord(
            request_id="r",
            model="m",
            tenant="",
            session="",
            service_class=request.service_class,
            prompt_tokens=3,
            arrived=0.0,
        )
        await self._step(Walk(request, Discard(), record, Suspicion()), proceed)


async def test_one_in_n_answers_is_audited_rather_one_that_was_handed_over() -> None:
    step = Step(AuditConfig(one_in=10, max_waiting=1000))
    plain, handed = answer(), answer(stream(member("d"), pair=PAIR))
    for index in range(4000):
        await step.serve(handed if index % 4 == 0 else plain)
    chosen = [x.answer.kinds for x in step.queue.waiting]
    assert 340 < len(chosen) < 460
    assert 0.55 < sum(map(bool, chosen)) / len(chosen) < 0.7  # a quarter of the answers
    assert step.skipped == 0


async def test_tenants_and_models_have_their_own_share() -> None:
    config = AuditConfig(one_in=1, models={"m": 0}, tenants={"t": 1})
    step = Step(config)
    await step.serve(answer())
    assert not step.queue.waiting
    await step.serve(answer(), structs.replace(ASKED, model="other"))
    await step.serve(answer(), structs.replace(ASKED, tenant="t"))
    assert [x.answer.tenant for x in step.queue.waiting] == ["", "t"]


async def test_an_answer_beyond_the_bound_and_one_that_cannot_be_audited_are_skipped() -> None:
    step = Step(AuditConfig(one_in=1, max_waiting=2))
    for _ in range(3):
        await step.serve(answer())
    assert (len(step.queue.waiting), step.skipped) == (2, 1)
    step.queue.waiting.clear()
    await step.serve(answer(), structs.replace(ASKED, sampling=SamplingParams(max_tokens=8)))
    assert (len(step.queue.waiting), step.skipped) == (0, 2)
