"""The order of the streams of one attempt: events, and the actions that follow from each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import WorkerFailed
from pdserve.types import ErrorInfo, FinishReason, StreamDelta
from router.attempt.handoff import (
    Exported,
    Failed,
    Finished,
    Handoff,
    Side,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.attempt.handoff import Action

    Short = tuple[object, ...]

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Driver:
    """A handoff with the streams "p" and "d", or "a" alone. Events are calls, which return the
    actions of the handoff in short form."""

    def __init__(
        self,
        names: str = "pd",
        *,
        max_tokens: int = 8,
        tokens: int = 0,
        has_moved: bool = False,
    ) -> None:
        self.sides = {x: Side.PREFILL if x == "p" else Side.DECODE for x in names}
        self.handoff = Handoff(
            max_tokens,
            tokens,
            names[-1],
            "p" if "p" in names else None,
            Side.PREVIOUS if has_moved else None,
        )

    def delta(self, name: str, *token_ids: int, **fields: Any) -> list[Short]:
        """Receive a delta with these fields of StreamDelta."""
        delta = StreamDelta(1, token_ids, **fields)
        return _short(self.handoff.on_delta(self.sides[name], delta))

    def error(self, name: str, code: str) -> list[Short]:
        error = ErrorInfo(code, code)
        return self.delta(name, finish_reason=FinishReason.ERROR, error=error)

    def lost(self, name: str) -> list[Short]:
        return _short(self.handoff.on_lost(self.sides[name], WorkerFailed("gone")))

    def export(self, name: str) -> bool:
        """Export the stream on a worker. Return False if it cannot be exported."""
        if can_export := self.handoff.can_export(name):
            self.handoff.export()
        return can_export

    def exported(self, name: str, tokens: int) -> list[Short]:
        return self.delta(name, finish_reason=FinishReason.ABORT, exported_tokens=tokens)

    def export_timeout(self) -> list[Short]:
        return _short(self.handoff.on_export_timeout())


def _short(actions: Sequence[Action]) -> list[Short]:
    found: list[Short] = []
    for action in actions:
        match action:
            case StreamDelta():
                found.append(("deliver", *action.token_ids))
            case Finished(delta, reason):
                found.append(("finished", *delta.token_ids, reason))
            case Failed(side, error, was_moving):
                what = "failed to move" if was_moving else "failed"
                found.append((what, side, error.code))
            case Exported():
                found.append(("exported",))
    return found


@pytest.fixture
def pair() -> Driver:
    return Driver()


@pytest.fixture
def decoding() -> Driver:
    """Return a pair whose prefill sent token 1 and whose decode sent token 2."""
    pair = Driver()
    assert pair.delta("p", 1, finish_reason=LENGTH) == [("deliver", 1)]
    assert pair.delta("d", 2) == [("deliver", 2)]
    return pair


class TestHandoff:
    def test_decode_continues_after_the_first_token_of_prefill(self, decoding: Driver) -> None:
        assert decoding.delta("d", 3, 4) == [("deliver", 3, 4)]
        assert decoding.delta("d", 5, finish_reason=STOP) == [("finished", 5, STOP)]

    def test_early_tokens_of_decode_wait_for_the_first_token(self, pair: Driver) -> None:
        assert pair.delta("d", 2) == []
        assert pair.delta("d", 3, finish_reason=LENGTH) == []
        expected = [("deliver", 1), ("deliver", 2), ("finished", 3, LENGTH)]
        assert pair.delta("p", 1, finish_reason=LENGTH) == expected

    def test_an_answer_that_ends_with_the_first_token_ignores_decode(self, pair: Driver) -> None:
        assert pair.error("d", "transfer_failed") == []
        assert pair.delta("p", 1, finish_reason=STOP) == [("finished", 1, STOP)]
        assert pair.delta("d", 2) == []

    def test_a_failed_transfer_ends_the_attempt_after_the_first_token(self) -> None:
        failed = ("failed", Side.DECODE, "transfer_failed")
        early, late = Driver(), Driver()
        assert early.error("d", "transfer_failed") == []
        assert early.delta("p", 1, finish_reason=LENGTH) == [("deliver", 1), failed]
        assert late.delta("p", 1, finish_reason=LENGTH) == [("deliver", 1)]
        assert late.error("d", "transfer_failed") == [failed]

    def test_a_failed_prefill_ends_the_attempt_without_early_tokens(self) -> None:
        for fail in (
            lambda pair: pair.lost("p"),
            lambda pair: pair.error("p", "worker_failed"),
            lambda pair: pair.delta("p", finish_reason=FinishReason.ABORT),
        ):
            pair = Driver()
            assert pair.delta("d", 2) == []
            assert fail(pair) == [("failed", Side.PREFILL, "worker_failed")]

    def test_a_prefill_worker_lost_after_the_first_token_changes_nothing(
        self, pair: Driver
    ) -> None:
        assert pair.delta("p", 1) == [("deliver", 1)]
        assert pair.lost("p") == []
        assert pair.delta("d", 2, finish_reason=STOP) == [("finished", 2, STOP)]

    def test_a_prefill_without_a_token_is_an_internal_error(self, pair: Driver) -> None:
        assert pair.delta("p", finish_reason=LENGTH) == [("failed", Side.PREFILL, "internal_error")]

    @pytest.mark.parametrize(("name", "code"), [("d", "invalid_value"), ("p", "deadline_exceeded")])
    def test_an_error_that_cannot_be_retried_ends_the_attempt_at_once(
        self, pair: Driver, name: str, code: str
    ) -> None:
        assert pair.error(name, code) == [("failed", pair.sides[name], code)]

    def test_a_worker_lost_after_the_last_token_costs_nothing(self, decoding: Driver) -> None:
        assert decoding.delta("d", *range(3, 9)) == [("deliver", *range(3, 9))]
        assert decoding.lost("d") == [("finished", LENGTH)]


class TestExport:
    def test_a_stream_is_exported_once_and_after_its_last_tokens(self, decoding: Driver) -> None:
        assert decoding.export("d")
        assert not decoding.export("d")
        assert decoding.delta("d", 3) == [("deliver", 3)]
        assert decoding.exported("d", tokens=3) == [("exported",)]

    def test_missing_tokens_fail_the_move(self, decoding: Driver) -> None:
        assert decoding.export("d")
        assert decoding.exported("d", tokens=3) == [("failed to move", Side.DECODE, "unavailable")]

    def test_a_worker_that_does_not_export_in_time_fails_the_move(self, decoding: Driver) -> None:
        assert decoding.export("d")
        assert decoding.export_timeout() == [("failed to move", Side.DECODE, "unavailable")]
        assert decoding.export_timeout() == []

    def test_an_end_that_comes_before_the_export_ends_the_answer(self, decoding: Driver) -> None:
        assert decoding.export("d")
        assert decoding.delta("d", 3, finish_reason=STOP) == [("finished", 3, STOP)]

    def test_a_worker_lost_during_the_export_fails_the_attempt(self, decoding: Driver) -> None:
        assert decoding.export("d")
        assert decoding.lost("d") == [("failed", Side.DECODE, "worker_failed")]

    def test_only_a_decoding_stream_with_tokens_left_is_exported(
        self, pair: Driver, decoding: Driver
    ) -> None:
        assert not pair.export("d")
        pair.delta("p", 1, finish_reason=LENGTH)
        assert not pair.export("d")
        assert not decoding.export("p")
        decoding.delta("d", 3, 4, 5, 6, 7)
        assert not decoding.export("d")


def test_one_worker_computes_both_phases() -> None:
    one = Driver("a", tokens=1)
    assert one.delta("a", 2) == [("deliver", 2)]
    assert one.lost("a") == [("failed", Side.DECODE, "worker_failed")]


def test_a_token_is_accepted_only_if_it_changes_no_state() -> None:
    pair = Driver()
    handoff = pair.handoff
    assert not handoff.accepts(Side.DECODE), "it waits for the first token"
    pair.delta("p", 1, finish_reason=LENGTH)
    assert not handoff.accepts(Side.DECODE), "it proves that decode has the KV"
    assert handoff.kv_held_by is Side.PREFILL
    pair.delta("d", 2)
    assert handoff.kv_held_by is None
    assert handoff.accepts(Side.DECODE)
    assert not handoff.accepts(Side.PREFILL), "it has ended"
    pair.delta("d", finish_reason=STOP)
    assert not handoff.accepts(Side.DECODE)
    assert handoff.tokens == 3


def test_the_next_attempt_frees_the_kv_at_the_first_delta_of_decode() -> None:
    driver = Driver("d", tokens=3, has_moved=True)
    assert not driver.export("d")
    assert not driver.handoff.uses("d"), "its KV is on the way"
    assert driver.delta("d", 4) == [("deliver", 4)]
    assert driver.handoff.kv_held_by is None
    assert driver.handoff.uses("d")


def test_an_attempt_uses_a_worker_while_it_computes_or_holds_kv() -> None:
    pair = Driver()
    assert pair.handoff.uses("p")
    assert not pair.handoff.uses("p9")
    pair.delta("p", 1, finish_reason=LENGTH)
    assert pair.handoff.uses("p"), "it holds the KV"
    pair.delta("d", 2)
    assert not pair.handoff.uses("p")
    pair.delta("d", 3, 4, 5, 6, 7)
    assert not pair.handoff.uses("d"), "one token is missing"


class World:
    """Consecutive attempts on workers whose tokens are consecutive numbers."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.end: Finished | Failed | Exported | None = None
        self.attempts = 0
        self.open("pd")

    def open(self, names: str, has_moved: bool = False) -> None:
        self.attempts += 1
        self.end = None
        tokens = len(self.delivered)
        self.driver = Driver(names, max_tokens=100, tokens=tokens, has_moved=has_moved)
        self.next = {x: len(self.delivered) + 1 for x in names}
        if "p" in names:
            self.next["d"] += 1

    def event(self, name: str, what: str) -> None:
        if self.end is not None or name not in self.next:
            return
        handoff, side = self.driver.handoff, self.driver.sides[name]
        if what == "export":
            self.driver.export(name)
            return
        if what == "timeout":
            self.perform(handoff.on_export_timeout())
            return
        if what == "token" and handoff.accepts(side):
            self.delivered.append(self.next[name])
            self.next[name] += 1
            return
        if what == "lost":
            actions = handoff.on_lost(side, WorkerFailed("gone"))
        else:
            actions = handoff.on_delta(side, self.delta(name, what))
        if what not in ("token", "nothing") or name == "p":
            self.next.pop(name, None)
        self.perform(actions)

    def delta(self, name: str, what: str) -> StreamDelta:
        if what == "exported":
            tokens = self.next[name] - 1
            return StreamDelta(1, finish_reason=FinishReason.ABORT, exported_tokens=tokens)
        if what == "nothing":
            return StreamDelta(1)
        if what not in ("token", LENGTH, STOP):
            return StreamDelta(1, finish_reason=FinishReason.ERROR, error=ErrorInfo(what, what))
        self.next[name] += 1
        finish = None if what == "token" else FinishReason(what)
        return StreamDelta(1, (self.next[name] - 1,), finish_reason=finish)

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert self.end is None, "nothing follows an end"
            match action:
                case StreamDelta():
                    self.delivered += action.token_ids
                case Finished(delta):
                    self.delivered += delta.token_ids
                    self.end = action
                case Failed() | Exported():
                    self.end = action
        if isinstance(self.end, Exported):
            self.open("d", has_moved=True)
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
)
def test_no_token_is_repeated_or_lost_whatever_happens(events: list[tuple[str, str]]) -> None:
    world = World()
    for name, what in events:
        world.event(name, what)
    assert world.delivered == list(range(1, len(world.delivered) + 1))
    handoff = world.driver.handoff
    assert handoff.tokens == len(world.delivered)
    assert world.end is not None or any(map(handoff.is_open, Side)), "nobody can end the answer"
