"""The order of the streams of one attempt: sequences of events, and what is done about each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import WorkerFailed
from pdserve.types import ErrorInfo, FinishReason, HandoffStyle, Role, StreamDelta
from router.handoff import Exported, Failed, Finished, Handoff, Phase, StreamState, SubmitDecode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.handoff import Action

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Driver:
    """A handoff that is told events, and says what it does about them, in words.

    Its streams are "p" and "d", or "a" alone. An event is a stream with tokens and perhaps a finish
    reason ("d 2 3 stop"), with the code of an error, with "exported" and a count, or "lost"; or it
    is "export", or "timeout".
    """

    def __init__(
        self,
        names: str = "pd",
        *,
        style: HandoffStyle = HandoffStyle.CONCURRENT,
        max_tokens: int = 8,
        tokens: list[int] | None = None,
        exported_by: str = "",
    ) -> None:
        phases = {"p": Phase.PREFILL, "d": Phase.DECODE, "a": Phase.AGGREGATED}
        self.streams = {x: StreamState(phases[x], x, Role.DECODE) for x in names}
        self.producer = None
        if exported_by:
            self.producer = StreamState(Phase.DECODE, exported_by, Role.DECODE, False, None, True)
        self.handoff = Handoff(
            max_tokens,
            tokens if tokens is not None else [],
            self.streams[names[-1]],
            self.streams.get("p"),
            self.producer,
            style,
        )

    def tell(self, event: str) -> str:
        name, *words = event.split()
        if name == "export":
            stream = self.handoff.exportable(words[0])
            if stream is not None:
                self.handoff.export(stream)
            return "" if stream is None else "asked"
        if name == "timeout":
            return _said(self.handoff.on_export_timeout())
        if words == ["lost"]:
            return _said(self.handoff.on_lost(self.streams[name], WorkerFailed("gone")))
        return _said(self.handoff.on_delta(self.streams[name], _delta(words)))


def _delta(words: list[str]) -> StreamDelta:
    delta = StreamDelta(1, tuple(int(x) for x in words if x.isdecimal()))
    for word in words:
        if word in (STOP, LENGTH, FinishReason.ABORT):
            delta.finish_reason = FinishReason(word)
        elif word == "kv":
            delta.kv_handle = b"kv"
        elif word == "exported":
            (count,), delta.token_ids = delta.token_ids, ()
            delta.finish_reason, delta.exported_tokens = FinishReason.ABORT, count
        elif not word.isdecimal():
            delta.finish_reason, delta.error = FinishReason.ERROR, ErrorInfo(word, word)
    return delta


def _said(actions: Sequence[Action]) -> str:
    return ", ".join(map(_name, actions))


def _name(action: Action) -> str:
    match action:
        case StreamDelta():
            return " ".join(["deliver", *map(str, action.token_ids)])
        case Finished(delta, reason):
            return " ".join(["finished", *map(str, delta.token_ids), reason])
        case Failed(stream, error, was_moving):
            return f"{stream.worker_id} failed{' to move' if was_moving else ''}: {error.code}"
        case SubmitDecode():
            return "submit decode"
        case Exported(stream):
            return f"exported {stream.worker_id}"


SEQUENTIAL = HandoffStyle.SEQUENTIAL
STARTED = ("p 1 length -> deliver 1", "d 2 -> deliver 2")


@pytest.mark.parametrize(
    "story",
    [
        # Prefill samples the first token, and decode continues.
        [*STARTED, "d 3 4 -> deliver 3 4", "d 5 stop -> finished 5 stop"],
        # What decode sends early waits for the first token.
        ["d 2", "d 3 length", "p 1 length -> deliver 1, deliver 2, finished 3 length"],
        # An answer can end with the first token, and what decode sends then is stale.
        ["d transfer_failed", "p 1 stop -> finished 1 stop", "d 2"],
        # A failed transfer ends the attempt after the first token.
        ["d transfer_failed", "p 1 length -> deliver 1, d failed: transfer_failed"],
        ["p 1 length -> deliver 1", "d transfer_failed -> d failed: transfer_failed"],
        # Prefill that fails ends the attempt, and early tokens are not delivered.
        ["d 2", "p lost -> p failed: worker_failed"],
        ["d 2", "p worker_failed -> p failed: worker_failed"],
        ["d 2", "p abort -> p failed: worker_failed"],
        # Prefill that is lost after the first token changes nothing.
        ["p 1 -> deliver 1", "p lost", "d 2 stop -> finished 2 stop"],
        # Prefill without a token is a bug.
        ["p length -> p failed: internal_error"],
        # Errors that are not retryable end the attempt at once.
        ["d invalid_value -> d failed: invalid_value"],
        ["p deadline_exceeded -> p failed: deadline_exceeded"],
        # A stream is exported once, and after its last tokens.
        [
            *(*STARTED, "export d -> asked", "export d", "d 3 -> deliver 3"),
            "d exported 3 -> exported d",
        ],
        # Tokens that are missing fail the move.
        [*STARTED, "export d -> asked", "d exported 3 -> d failed to move: unavailable"],
        # So does a worker that does not export in time.
        [*STARTED, "export d -> asked", "timeout -> d failed to move: unavailable", "timeout"],
        # An end that comes first is an end.
        [*STARTED, "export d -> asked", "d 3 stop -> finished 3 stop"],
        [*STARTED, "export d -> asked", "d lost -> d failed: worker_failed"],
        # Only a settled stream with tokens left is exported.
        ["export d", "p 1 length -> deliver 1", "export d", "d 2 -> deliver 2", "export p"],
        [*STARTED, "d 3 4 5 6 7 -> deliver 3 4 5 6 7", "export d"],
        # A worker that is lost after the last token costs nothing.
        [*STARTED, "d 3 4 5 6 7 8 -> deliver 3 4 5 6 7 8", "d lost -> finished length"],
    ],
    ids="; ".join,
)
def test_a_pair_with_an_immediate_handoff(story: list[str]) -> None:
    follow(Driver(), story)


@pytest.mark.parametrize(
    "story",
    [
        ["p 1 length kv -> deliver 1, submit decode", "d 2 -> deliver 2"],
        ["p 1 stop -> finished 1 stop"],
        # Prefill that kept no KV is a failed transfer.
        ["p 1 length -> deliver 1, d failed: transfer_failed"],
        # Decode cannot begin without the end of prefill.
        ["p 1 -> deliver 1", "p lost -> p failed: worker_failed"],
    ],
    ids="; ".join,
)
def test_a_pair_with_a_sequential_handoff(story: list[str]) -> None:
    follow(Driver(style=SEQUENTIAL), story)


def test_one_worker_does_both_phases() -> None:
    follow(Driver("a", tokens=[1]), ["a 2 -> deliver 2", "a lost -> a failed: worker_failed"])


def follow(driver: Driver, story: list[str]) -> None:
    """Tell the events of a story, each with what follows after an arrow."""
    for line in story:
        event, _, expected = line.partition(" -> ")
        assert driver.tell(event) == expected, line


def test_a_token_is_accepted_only_if_it_changes_no_state() -> None:
    pair = Driver()
    handoff, prefill, decode = pair.handoff, pair.streams["p"], pair.streams["d"]
    assert not handoff.accepts(decode, 2), "it waits for the first token"
    pair.tell("p 1 length")
    assert not handoff.accepts(decode, 2), "it proves that decode has the KV"
    assert prefill.holds_kv
    pair.tell("d 2")
    assert not prefill.holds_kv
    assert handoff.accepts(decode, 3)
    assert not handoff.accepts(prefill, 4), "it has ended"
    pair.tell("d stop")
    assert not handoff.accepts(decode, 4)
    assert handoff.tokens == [1, 2, 3]


def test_the_next_attempt_frees_the_kv_when_decode_speaks() -> None:
    driver = Driver("d", tokens=[1, 2, 3], exported_by="old")
    assert driver.tell("export d") == ""
    assert not driver.handoff.uses("d"), "its KV is on the way"
    assert driver.tell("d 4") == "deliver 4"
    assert driver.producer is not None
    assert not driver.producer.holds_kv
    assert driver.handoff.uses("d")


def test_an_attempt_leaves_only_a_worker_that_it_uses() -> None:
    pair = Driver()
    assert pair.handoff.uses("p")
    assert not pair.handoff.uses("p9")
    pair.tell("p 1 length")
    assert pair.handoff.uses("p"), "it holds the KV"
    pair.tell("d 2")
    assert not pair.handoff.uses("p")
    pair.tell("d 3 4 5 6 7")
    assert not pair.handoff.uses("d"), "one token is missing"


class World:
    """Attempts one after the other, on workers that count: each sends the next number."""

    def __init__(self, style: HandoffStyle) -> None:
        self.style = style
        self.all: list[int] = []
        self.delivered: list[int] = []
        self.end: Finished | Failed | Exported | None = None
        self.attempts = 0
        self.open("pd")

    def open(self, names: str, exported_by: str = "") -> None:
        self.attempts += 1
        self.end = None
        self.driver = Driver(
            names, style=self.style, max_tokens=100, tokens=self.all, exported_by=exported_by
        )
        self.next = {x: len(self.all) + 1 for x in names}
        if "p" in names:
            self.next["d"] += 1
            if self.style is HandoffStyle.SEQUENTIAL:
                del self.next["d"]

    def event(self, name: str, what: str) -> None:
        if self.end is not None or name not in self.next:
            return
        handoff, stream = self.driver.handoff, self.driver.streams[name]
        if what == "export":
            self.driver.tell(f"export {name}")
            return
        if what == "timeout":
            self.perform(handoff.on_export_timeout())
            return
        if what == "token" and handoff.accepts(stream, self.next[name]):
            self.delivered.append(self.next[name])
            self.next[name] += 1
            return
        if what == "lost":
            actions = handoff.on_lost(stream, WorkerFailed("gone"))
        else:
            actions = handoff.on_delta(stream, self.delta(name, what))
        if what not in ("token", "nothing") or name == "p":
            self.next.pop(name, None)
        self.perform(actions)

    def delta(self, name: str, what: str) -> StreamDelta:
        if what == "exported":
            return _delta(["exported", str(self.next[name] - 1)])
        if what not in ("token", "length", "stop"):
            return _delta([] if what == "nothing" else [what])
        self.next[name] += 1
        handle = ["kv"] if name == "p" and what == "length" else []
        finish = [] if what == "token" else [what]
        return _delta([str(self.next[name] - 1), *finish, *handle])

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert self.end is None, "nothing follows an end"
            match action:
                case StreamDelta():
                    self.delivered += action.token_ids
                case SubmitDecode():
                    self.next["d"] = len(self.all) + 1
                case Finished(delta):
                    self.delivered += delta.token_ids
                    self.end = action
                case Failed() | Exported():
                    self.end = action
        if isinstance(self.end, Exported):
            self.open("d", exported_by="old")
        elif isinstance(self.end, Failed) and self.end.error.code != "invalid_value":
            self.open("pd" if self.attempts % 2 else "a")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("pda"),
            st.sampled_from(
                [
                    *("token", "length", "stop", "lost", "invalid_value", "nothing"),
                    *("transfer_failed", "unavailable", "export", "exported", "timeout"),
                ]
            ),
        ),
        max_size=16,
    ),
    st.sampled_from(HandoffStyle),
)
def test_no_token_is_repeated_or_lost_whatever_happens(
    events: list[tuple[str, str]], style: HandoffStyle
) -> None:
    world = World(style)
    for name, what in events:
        world.event(name, what)
    assert world.delivered == list(range(1, len(world.delivered) + 1)) == world.all
    streams = world.driver.streams.values()
    assert world.end is not None or any(x.open for x in streams), "nobody can end the answer"
