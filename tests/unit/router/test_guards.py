"""Guards: what they find, what leaves a stream, and what a service that is slow or down does."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.config import Config, GuardConfig, RouterConfig, parse, read_yaml
from pdserve.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.security.patterns import Patterns
from pdserve.types import FinishReason, SamplingParams, ToolCallDelta, Usage
from router.attempt.answer import AnswerDelta, ParsedDelta
from router.attempt.streams import Answer
from router.attempt.suspects import Suspicion
from router.guardrails.classifier import GuardClassifier
from router.guardrails.guard import (
    PASSED,
    Checked,
    GuardCheckFailed,
    GuardedText,
    GuardPlace,
    Guardrail,
    Guards,
    GuardVerdict,
    PatternChecker,
    Subject,
    check_prompt,
)
from router.steps.guard import GuardStep
from router.walk import Answered, RequestRecord, Walk
from tests.support.commands import ROOT
from tests.support.router_stack import MODEL, request
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.types import GenerateRequest, ModelInfo
    from router.guardrails.guard import Checker

# Each has matches of at most 12 characters.
PATTERNS = ["ab+c", r"\bcab?\b", "(?i)x(y|yz)z", r"a[^b]b", "b{2,3}$"]


class Notes:
    def __init__(self) -> None:
        self.verdicts: list[tuple[str, str, str]] = []

    def note(
        self, guard: str, subject: Subject, verdict: GuardVerdict, took_s: float | None, reason: str
    ) -> None:
        self.verdicts.append((guard, subject.place.value, verdict.value))

    def refused(self, subject: Subject, code: str, reason: str) -> None: ...


def guard(checker: Checker | None = None, notes: Notes | None = None, **values: Any) -> Guardrail:
    kind = {"url": "http://x"} if checker else {}
    config = parse(GuardConfig, {"name": "g", **kind, **values})
    if checker is None:
        patterns = Patterns(config.patterns, config.words, longest=config.hold_back_chars)
        checker = PatternChecker(patterns, GuardVerdict(config.verdict), config.replacement)
    return Guardrail(config, checker, notes or Notes())


class Client:
    def __init__(self) -> None:
        self.deltas: list[AnswerDelta] = []

    def write(self, delta: AnswerDelta) -> bool:
        self.deltas.append(delta)
        return True

    @property
    def text(self) -> str:
        return "".join(x.text for x in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [i for x in self.deltas for i in x.token_ids]


async def send(
    guards: Sequence[Guardrail],
    deltas: Sequence[AnswerDelta],
    after_each: Callable[[Client], Any] | None = None,
    **values: Any,
) -> tuple[Client, Answered, int]:
    """Send deltas through the step, until it returns False. Return the client, the result and the
    number of deltas that the step took."""
    client, asked = Client(), request(**values)
    record = RequestRecord(
        request_id="r",
        model="demo",
        tenant="",
        session="",
        service_class=asked.service_class,
        prompt_tokens=1,
        arrived=0.0,
    )
    record.answers = [Answer(client, 99, [], i) for i in range(asked.sampling.n)]
    taken = 0

    async def proceed(walk: Walk) -> Answered:
        nonlocal taken
        for delta in deltas:
            reads = walk.out.write(delta)
            taken += 1
            await asyncio.sleep(0)
            if after_each is not None:
                await after_each(client)
            if not reads and delta.finish_reason is None:
                last = AnswerDelta((), index=delta.index, finish_reason=FinishReason.STOP)
                last.usage = Usage(1, taken)
                walk.out.write(last)
                break
        return Answered(record.answers, AnswerDelta())

    async with asyncio.timeout(WAIT_S):
        walk = Walk(asked, client, record, Suspicion())
        done = await GuardStep(Guards(guards))(walk, proceed)
    return client, done, taken


def chunks(text: str, cuts: Sequence[int]) -> list[AnswerDelta]:
    """Divide a text into deltas of these sizes, each of one token, the number of its delta."""
    found, at = [], 0
    for size in cuts:
        found.append(text[at : at + size])
        at += size
    parts = [*found, text[at:]]
    deltas = [AnswerDelta((i,), x) for i, x in enumerate(parts)]
    deltas.append(AnswerDelta((), finish_reason=FinishReason.STOP, usage=Usage(1, len(parts))))
    return deltas


def whole(text: str, patterns: Sequence[str]) -> list[tuple[int, int]]:
    """Return the matches as `re` finds them: the longest of those that begin first."""
    found, at = [], 0
    while at < len(text):
        ends = [
            end
            for end in range(at + 1, min(len(text), at + 12) + 1)
            if any(re.fullmatch(_at(x, text, at, end), text, re.DOTALL) for x in patterns)
        ]
        if ends:
            found.append((at, ends[-1]))
        at = ends[-1] if ends else at + 1
    return found


def _at(pattern: str, text: str, begin: int, end: int) -> str:
    """Return a pattern that matches the whole text if `pattern` matches from `begin` to `end`."""
    flags = "(?i)" if pattern.startswith("(?i)") else ""
    rest = pattern.removeprefix(flags)
    return f"{flags}.{{{begin}}}(?:{rest}).{{{len(text) - end}}}"


@example("xabc", [1, 0, 3])  # a token without text before a match
@example("acab", [1, 1, 2])  # what is before a match has left
@example("z" * 30 + "abc" + "z" * 5, [])  # a long text
@given(st.text("abcxyzZ -", max_size=60), st.lists(st.integers(0, 9), max_size=30))
def test_what_leaves_does_not_depend_on_how_the_text_arrives(text: str, cuts: list[int]) -> None:
    matches = whole(text, PATTERNS)
    assert Patterns(PATTERNS, longest=12).scan(text)[0] == matches
    guards = [guard(patterns=PATTERNS, verdict="redact", replacement="*", hold_back_chars=12)]
    client, _, _ = asyncio.run(send(guards, deltas := chunks(text, cuts)))
    expected, at = "", 0
    for begin, end in matches:
        expected += text[at:begin] + "*"
        at = end
    assert client.text == expected + text[at:]
    # The tokens of what is replaced do not leave, and no others are missing.
    begin, told = 0, []
    for delta in deltas:
        end = begin + max(1, len(delta.text))
        if not any(x < end and begin < y for x, y in matches):
            told += delta.token_ids
        begin += len(delta.text)
    assert client.ids == told
    assert client.deltas[-1].finish_reason is FinishReason.STOP


def service(verdict: Checked | Exception | None, wait: asyncio.Event | None = None) -> Any:
    """Return a checker that gives `verdict`, or one by the text; it keeps what it got in `seen`."""

    class Service:
        def __init__(self) -> None:
            self.seen: list[GuardedText] = []

        async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked:
            self.seen += pieces
            if wait is not None:
                await wait.wait()
            if isinstance(verdict, Exception):
                raise verdict
            if verdict is not None:
                return verdict
            text = pieces[0].text
            if "bad" in text:
                return Checked(GuardVerdict.REFUSE)
            new = text.replace("red", "blue")
            return PASSED if new == text else Checked(GuardVerdict.REDACT, [new])

    return Service()


SENTENCES = "One red fish. Two fish.\nThree"


@pytest.mark.parametrize("size", [1, 3, 50])
async def test_a_service_gets_sentences_and_changes_them(size: int) -> None:
    checker = service(None)
    client, done, _ = await send([guard(checker)], chunks(SENTENCES, [size] * 30))
    assert client.text == "One blue fish. Two fish.\nThree"
    assert "".join(x.text for x in checker.seen) == SENTENCES
    assert {x.kind for x in checker.seen} == {"text"}
    assert done.answers[0].finish_reason == ""
    if size < 50:
        assert len(checker.seen) > 1


async def test_experts_are_refused_where_a_guard_checks_answers() -> None:
    with pytest.raises(InvalidRequest) as refused:
        await send([guard(words=("a",))], [], sampling=SamplingParams(routed_experts=True))
    assert refused.value.field == "routed_experts"


async def test_whole_answers_are_checked_as_one() -> None:
    checker = service(None)
    await send([guard(checker, pieces="whole")], chunks(SENTENCES, [2] * 20))
    assert checker.seen == [GuardedText("text", SENTENCES)]


async def test_a_stream_holds_back_no_more_than_it_may() -> None:
    """A sentence without end is cut, and what may begin a match waits."""
    checker = service(PASSED)
    await send([guard(checker, hold_back_chars=8)], chunks("a" * 30, [4] * 7))
    assert max(len(x.text) for x in checker.seen) <= 12
    left = []

    async def note(client: Client) -> None:
        left.append(len(client.text))

    both = [guard(patterns=["a{3,8}b"], hold_back_chars=8), guard(words=["aaaaaaaaaaaaa"])]
    await send(both[:1], chunks("a" * 30, [1] * 29), note)
    assert left[-1] == 30
    assert all(at + 1 - x <= 9 for at, x in enumerate(left[:30]))


async def test_a_part_of_a_sentence_is_checked_after_some_time() -> None:
    checker = service(PASSED)

    async def until_it_leaves(client: Client) -> None:
        await wait_until(lambda: client.text != "")

    deltas = chunks("no end of it", [6])
    await send([guard(checker, hold_back_s=0.001)], deltas, until_it_leaves)
    assert checker.seen[0].text == "no end"


@pytest.mark.parametrize("kind", ["patterns", "service"])
async def test_a_refused_answer_ends_at_once_with_its_reason_and_its_usage(kind: str) -> None:
    checker = service(None) if kind == "service" else None
    one = guard(checker, **({} if checker else {"words": ["bad"]}))
    client, done, taken = await send([one], chunks("All good. A bad word. More.\n", [4] * 20))
    assert "bad" not in client.text
    assert client.text.startswith("All good")
    assert taken < 10
    last = client.deltas[-1]
    assert last.finish_reason is FinishReason.CONTENT_FILTER
    assert last.usage == Usage(1, taken)
    assert done.answers[0].finish_reason == "content_filter"
    assert done.answers[0].cut is FinishReason.CONTENT_FILTER


async def test_what_a_guard_logs_leaves_unchanged() -> None:
    notes = Notes()
    client, _, _ = await send(
        [guard(None, notes, words=["red"], verdict="log")], chunks(SENTENCES, [5] * 5)
    )
    assert client.text == SENTENCES
    assert notes.verdicts == [("g", "answer", "log")]


async def test_guards_follow_each_other() -> None:
    guards = [
        guard(words=["fish"], verdict="redact", replacement="red bird"),
        guard(checker := service(None)),
        guard(words=["One"], verdict="redact", replacement="1"),
    ]
    client, _, _ = await send(guards, chunks(SENTENCES, [3] * 9))
    assert client.text == "1 blue blue bird. Two blue bird.\nThree"
    assert "fish" not in "".join(x.text for x in checker.seen)


async def test_reasoning_and_arguments_are_checked_apart() -> None:
    call = ToolCallDelta(0, "id", "search", '{"q": "red')
    deltas: list[AnswerDelta] = [
        ParsedDelta((1,), reasoning="re"),
        ParsedDelta((2,), text="d fish. red"),
        ParsedDelta((3,), tool_calls=(call, ToolCallDelta(0, arguments=' fish"}'))),
        ParsedDelta((), finish_reason=FinishReason.STOP, usage=Usage(1, 3)),
    ]
    checker = service(None)
    client, _, _ = await send([guard(checker)], deltas)
    assert [*dict.fromkeys(x.kind for x in checker.seen)] == ["reasoning", "text", "tool_call"]
    parsed = [x for x in client.deltas if isinstance(x, ParsedDelta)]
    assert "".join(x.reasoning for x in parsed) == "re"  # a match does not go on in another kind
    assert client.text == "d fish. blue"
    calls = [y for x in parsed for y in x.tool_calls]
    assert "".join(x.arguments for x in calls) == '{"q": "blue fish"}'
    assert calls[0].name == "search"
    refused, _, _ = await send([guard(words=["red fish"])], deltas)
    assert refused.deltas[-1].finish_reason is FinishReason.CONTENT_FILTER


async def test_a_refused_answer_harms_no_other_answer_of_the_request() -> None:
    deltas = [
        AnswerDelta((1,), "good"),
        AnswerDelta((1,), "bad", index=1),
        AnswerDelta((2,), " too"),
        AnswerDelta((), finish_reason=FinishReason.STOP, index=1),
        AnswerDelta((), finish_reason=FinishReason.STOP, usage=Usage(1, 4)),
    ]
    checker, sampling = service(None), SamplingParams(n=2)
    client, done, _ = await send([guard(checker)], deltas, sampling=sampling)
    assert [x.text for x in client.deltas if x.index == 0] == ["good", " too", ""]
    assert [x.finish_reason for x in client.deltas if x.index == 1] == [FinishReason.CONTENT_FILTER]
    assert client.deltas[-1].usage is not None
    assert [x.finish_reason for x in done.answers] == ["", "content_filter"]


async def test_tokens_whose_text_is_late_leave_at_the_end_and_only_if_nothing_was_replaced() -> (
    None
):
    sampling = SamplingParams(stop=("xyz",))
    for text, ids in (("One fish", [0, 1, 2]), ("One red", [])):
        one = guard(words=["red"], verdict="redact")
        client, _, _ = await send([one], chunks(text, [3, 3]), sampling=sampling)
        assert client.ids == ids
        assert not any(x.token_ids for x in client.deltas[:-1])


FAILURES = [GuardCheckFailed("down"), Unavailable("no worker"), None]


@pytest.mark.parametrize("failure", FAILURES, ids=["down", "unavailable", "slow"])
@pytest.mark.parametrize("mode", ["open", "closed"])
async def test_a_service_without_verdict_fails_as_configured(
    failure: Exception | None, mode: str
) -> None:
    notes = Notes()
    checker = service(failure, None if failure else asyncio.Event())
    one = guard(checker, notes, on_failure=mode, timeout_s=0.001)
    subject = Subject(GuardPlace.PROMPT, "r", "", "m")
    if mode == "open":
        client, _, _ = await send([one], chunks(SENTENCES, [9] * 3))
        assert client.text == SENTENCES
        assert not await check_prompt([one], subject, [GuardedText("user", "x")], "p")
    else:
        with pytest.raises(Unavailable, match="'g' gave no verdict on the answer") as error:
            await send([one], chunks(SENTENCES, [9] * 3))
        assert error.value.reason == "guard_failed"
        with pytest.raises(Unavailable, match="on the prompt"):
            await check_prompt([one], subject, [GuardedText("user", "x")], "p")
    assert {x[2] for x in notes.verdicts} == {"failed"}


async def test_no_more_calls_than_allowed_are_in_flight() -> None:
    may_end = asyncio.Event()
    checker = service(PASSED, may_end)
    one, subject = (
        guard(checker, max_calls=2, timeout_s=60),
        Subject(GuardPlace.PROMPT, "r", "", "m"),
    )
    calls = [asyncio.create_task(one.check(subject, [GuardedText("user", "x")])) for _ in range(5)]
    await wait_until(lambda: len(checker.seen) == 2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(checker.seen) == 2
    may_end.set()
    await asyncio.gather(*calls)
    assert len(checker.seen) == 5


def test_a_guard_watches_what_its_configuration_names() -> None:
    one = guard(words=["x"], places=["answer"], tenants=["a"], models=["m", "lora"])
    assert one.watches(GuardPlace.ANSWER, "a", {"m"})
    assert one.watches(GuardPlace.ANSWER, "a", {"base", "lora"})
    assert not one.watches(GuardPlace.PROMPT, "a", {"m"})
    assert not one.watches(GuardPlace.ANSWER, "b", {"m"})
    assert not one.watches(GuardPlace.ANSWER, "a", {"other"})


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({}, "name", "needs one of patterns or words"),
        ({"words": ["x"], "url": "http://x"}, "name", "ext_proc and"),
        ({"patterns": ["(a"]}, "patterns[0]", "missing )"),
        ({"patterns": ["x", "a*"]}, "patterns[1]", "empty text"),
        ({"patterns": [r"(a)\1"]}, "patterns[0]", "not supported"),
        ({"patterns": ["a{300}"]}, "patterns[0]", "300 characters"),
        ({"words": ["x" * 300]}, "words[0]", "longer than"),
        ({"classifier": {"model": "m"}}, "classifier.flagged", "needs an example"),
        ({"ext_proc": "nowhere"}, "ext_proc", "host:port"),
        ({"words": ["x"], "tenants": ["a"]}, "tenants", "'a' is not one of the tenants"),
        ({"words": ["x"], "ca_file": "ca.pem"}, "ca_file", "needs ext_proc"),
        ({"url": "http://x", "ca_file": "ca.pem"}, "ca_file", "https"),
        ({"words": ["x"], "region": "eu"}, "region", "needs url"),
        ({"url": "http://x", "region": "eu"}, "region", "not one of residency.regions"),
    ],
)
def test_a_guard_that_cannot_work_is_refused_by_key(
    values: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        parse(RouterConfig, {"guards": [{"name": "g", **values}]})
    assert error.value.field == f"guards[0].{key}"


def test_time_does_not_explode_with_the_text() -> None:
    """The steps of the automaton, not seconds, are counted: `re` needs 2**30 of them here."""
    patterns = Patterns([r"(a|a)+b", r"(a?){30}a{30}!"], longest=64)
    steps = 0
    move = patterns._move

    def count(state: Any, char: str) -> Any:
        nonlocal steps
        steps += 1
        return move(state, char)

    patterns._move = count  # type: ignore[method-assign]
    assert patterns.scan("a" * 5000)[0] == []
    assert steps < 1000


class Letters:
    """A tokenizer of characters."""

    def encode_within(self, texts: Sequence[str], most: int) -> tuple[tuple[int, ...], int]:
        return tuple(map(ord, texts[0]))[:most], 0

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


async def test_a_classifier_sees_every_part_of_a_long_text_and_keeps_its_examples() -> None:
    asked: list[tuple[str, Any]] = []

    async def embed(each: GenerateRequest) -> bytes:
        text = "".join(map(chr, each.prompt_token_ids))
        asked.append((text, each.regions))
        return np.array([1, 0] if "bad" in text else [0, 1], "<f4").tobytes()

    async def tokenizer(_: ModelInfo) -> Any:
        return Letters()

    examples = {"model": "demo", "flagged": ["bad"], "harmless": ["good"]}
    config = parse(GuardConfig, {"name": "g", "classifier": examples, "verdict": "redact"})
    model = replace(MODEL, max_model_len=20)
    classifier = GuardClassifier(config, lambda: {"demo": model}, tokenizer, embed)
    subject = Subject(GuardPlace.PROMPT, "r", "", "m", frozenset({"eu"}))
    pieces = [
        GuardedText("user", "x" * 50 + "bad"),
        GuardedText("user", "fine"),
        GuardedText("user", ""),
    ]
    checked = await classifier.check(subject, pieces)
    assert checked == Checked(GuardVerdict.REDACT, ["[redacted]", "fine", ""])
    assert await classifier.check(subject, pieces[1:]) == PASSED
    assert [x for x, _ in asked[:2]] == ["bad", "good"]
    assert {x for _, x in asked[2:]} == {frozenset({"eu"})}
    assert [x for x, _ in asked].count("good") == 1
    await classifier.close()


@pytest.mark.parametrize("size", [1, 3, 20])
async def test_a_match_may_begin_in_the_text_that_the_client_has(size: int) -> None:
    one = guard(patterns=[r"\d{3}-\d{2}-\d{4}"], verdict="redact", replacement="#")
    values = {"resume": (1, 2), "resume_text": "999-99-9999 and 123-4"}
    client, _, _ = await send([one], chunks("5-6789, 5-6789", [size] * 14), **values)
    assert client.text == "#, 5-6789"


def test_the_configurations_of_the_document_are_valid() -> None:
    text = (ROOT / "docs" / "guards.md").read_text("utf-8")
    found = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(found) == 2
    for each in found:
        assert parse(Config, read_yaml(each, "guards.md")).router.guards
