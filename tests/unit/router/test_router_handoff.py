"""The handoff of one request: sequences of events, and what is to be done about each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import (
    ErrorInfo,
    FinishReason,
    HandoffStyle,
    PhaseReport,
    Role,
    StreamDelta,
)
from router.handoff import Handoff
from router.handoff_actions import (
    Action,
    CancelLeg,
    Deliver,
    Fail,
    Finish,
    Resubmit,
    SubmitDecode,
    TakeOver,
)
from router.ladder import Ladder, LadderLimits, Step
from router.leg import Leg, LegKind

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CORRUPTED = TransferCorrupted("blocks 0+4 came damaged")


class Driver:
    """A handoff with its legs by letter, whose actions read as text."""

    def __init__(self, *, max_tokens: int = 8, limits: LadderLimits | None = None) -> None:
        self.handoff = Handoff(max_tokens, ladder=Ladder(limits or LadderLimits()))
        self.legs: dict[str, Leg] = {}
        self.resubmits: list[Resubmit] = []

    def pair(
        self, prefill: str = "p", decode: str = "d", style: HandoffStyle = HandoffStyle.CONCURRENT
    ) -> None:
        self.legs[prefill] = Leg(LegKind.PREFILL, prefill, Role.PREFILL)
        self.legs[decode] = Leg(LegKind.DECODE, decode, Role.DECODE)
        self.handoff.open_pair(self.legs[prefill], self.legs[decode], style)

    def whole(self, name: str, role: Role = Role.DECODE) -> None:
        self.legs[name] = Leg(LegKind.WHOLE, name, role)
        self.handoff.open_whole(self.legs[name])

    def tokens(
        self, name: str, *token_ids: int, finish: FinishReason | None = None, handle: bytes = b""
    ) -> list[str]:
        report = None if finish is None else PhaseReport()
        delta = StreamDelta(1, token_ids, finish_reason=finish, report=report, kv_handle=handle)
        return self._say(self.handoff.on_delta(self.legs[name], delta))

    def error(self, name: str, error: PdserveError) -> list[str]:
        info = ErrorInfo(error.code, error.message)
        delta = StreamDelta(1, finish_reason=FinishReason.ERROR, error=info)
        return self._say(self.handoff.on_delta(self.legs[name], delta))

    def lost(self, name: str) -> list[str]:
        return self._say(self.handoff.on_lost(self.legs[name], WorkerFailed(f"{name} is gone")))

    def export(self, worker_id: str) -> bool:
        """Whether the answer can leave a worker with its KV; then it is being exported."""
        leg = self.handoff.exportable(worker_id)
        if leg is not None:
            self.handoff.export(leg)
        return leg is not None

    def exported(self, name: str, tokens: int) -> list[str]:
        delta = StreamDelta(1, finish_reason=FinishReason.ABORT, exported_tokens=tokens)
        return self._say(self.handoff.on_delta(self.legs[name], delta))

    def late(self) -> list[str]:
        return self._say(self.handoff.export_late())

    def live(self, name: str, source: str) -> None:
        self.legs[name] = Leg(LegKind.DECODE, name, Role.DECODE, source=source)
        self.handoff.open_live(self.legs[name])

    def unplaced(self) -> list[str]:
        return self._say(self.handoff.unplaced(self.resubmits[-1], Unavailable("nobody is left")))

    def abandon(self) -> list[str]:
        return self._say(self.handoff.abandon())

    def _say(self, actions: object) -> list[str]:
        return [self._name(action) for action in actions]  # type: ignore[attr-defined]

    def _name(self, action: Action) -> str:
        match action:
            case Deliver(delta):
                return f"deliver {list(delta.token_ids)}"
            case Finish(delta, reason):
                return f"finish {list(delta.token_ids)} {reason}"
            case Fail(error):
                return f"fail {error.code}"
            case CancelLeg(leg):
                return f"cancel {leg.worker_id}"
            case SubmitDecode(leg, handle, resume):
                return f"submit {leg.worker_id} {handle.decode()} after {list(resume)}"
            case TakeOver(resume):
                return f"take over after {list(resume)}"
            case Resubmit(rung, resume):
                self.resubmits.append(action)
                words = [rung.step.value, *filter(None, [rung.prefill]), f"after {list(resume)}"]
                if rung.without:
                    words.append(f"without {' '.join(sorted(rung.without))}")
                elif rung.avoid:
                    words.append(f"avoiding {' '.join(sorted(rung.avoid))}")
                return " ".join(words)


@pytest.fixture
def pair() -> Driver:
    driver = Driver()
    driver.pair()
    return driver


def test_a_token_takes_the_short_way_only_where_it_changes_nothing_else() -> None:
    driver = Driver()
    driver.pair()
    handoff, prefill, decode = driver.handoff, driver.legs["p"], driver.legs["d"]
    assert not handoff.goes_on(decode, 2)  # it waits for the first token
    driver.tokens("p", 1, finish=LENGTH)
    assert not handoff.goes_on(decode, 2)  # the blocks that prefill holds are taken by it
    assert handoff.tokens == [1]
    driver.tokens("d", 2)
    assert not prefill.holds
    assert handoff.goes_on(decode, 3)
    assert handoff.tokens == [1, 2, 3]
    assert not handoff.goes_on(prefill, 4)  # it has said its last
    driver.abandon()
    assert not handoff.goes_on(decode, 4)
    assert handoff.tokens == [1, 2, 3]


def test_prefill_samples_first_and_decode_goes_on(pair: Driver) -> None:
    assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]"]
    assert pair.tokens("d", 2) == ["deliver [2]"]
    assert pair.tokens("d", 3, 4) == ["deliver [3, 4]"]
    assert pair.tokens("d", 5, finish=STOP) == ["finish [5] stop"]
    assert pair.handoff.tokens == [1, 2, 3, 4, 5]
    assert pair.handoff.done
    assert pair.handoff.fallbacks == []
    assert pair.handoff.first_token_leg is pair.legs["p"]


@pytest.fixture
def in_turn() -> Driver:
    driver = Driver()
    driver.pair(style=HandoffStyle.SEQUENTIAL)
    return driver


def test_decode_gets_its_turn_when_prefill_has_ended(in_turn: Driver) -> None:
    actions = in_turn.tokens("p", 1, finish=LENGTH, handle=b"kv")
    assert actions == ["deliver [1]", "submit d kv after [1]"]
    assert in_turn.legs["p"].holds
    assert in_turn.tokens("d", 2) == ["deliver [2]"]
    assert not in_turn.legs["p"].holds
    assert in_turn.tokens("d", 3, finish=STOP) == ["finish [3] stop"]
    assert in_turn.handoff.fallbacks == []


def test_decode_gets_no_turn_where_the_first_token_ends_the_answer(in_turn: Driver) -> None:
    assert in_turn.tokens("p", 1, finish=STOP) == ["finish [1] stop", "cancel d"]


def test_a_prefill_that_fails_before_its_token_is_tried_again_in_turn(in_turn: Driver) -> None:
    assert in_turn.lost("p") == ["cancel d", "other_prefill after [] without p"]
    in_turn.pair("p2", "d2", HandoffStyle.SEQUENTIAL)
    actions = in_turn.tokens("p2", 1, finish=LENGTH, handle=b"kv")
    assert actions == ["deliver [1]", "submit d2 kv after [1]"]


def test_a_prefill_that_is_lost_with_its_kv_is_replaced(in_turn: Driver) -> None:
    assert in_turn.tokens("p", 1) == ["deliver [1]"]
    assert in_turn.lost("p") == ["cancel d", "other_prefill after [1] without p"]
    in_turn.whole("w")
    assert in_turn.tokens("w", 2, finish=STOP) == ["finish [2] stop"]


def test_a_prefill_that_kept_no_kv_is_asked_again(in_turn: Driver) -> None:
    assert in_turn.tokens("p", 1, finish=LENGTH) == [
        "deliver [1]",
        "cancel p",
        "same_prefill p after [1] avoiding d",
    ]


@pytest.mark.parametrize("how", ["error", "lost"])
def test_a_decode_that_fails_in_its_turn_is_replaced(in_turn: Driver, how: str) -> None:
    in_turn.tokens("p", 1, finish=LENGTH, handle=b"kv")
    failed = in_turn.error("d", TransferFailed("x")) if how == "error" else in_turn.lost("d")
    word = "avoiding" if how == "error" else "without"
    assert failed == ["cancel p", f"same_prefill p after [1] {word} d"]


def test_a_client_that_leaves_between_the_turns_ends_both(in_turn: Driver) -> None:
    assert in_turn.abandon() == ["cancel p", "cancel d"]
    again = Driver()
    again.pair(style=HandoffStyle.SEQUENTIAL)
    again.tokens("p", 1, finish=LENGTH, handle=b"kv")
    assert again.abandon() == ["cancel p", "cancel d"]


def test_tokens_of_decode_that_come_early_wait_for_the_first(pair: Driver) -> None:
    assert pair.tokens("d", 2) == []
    assert pair.tokens("d", 3) == []
    assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]", "deliver [2]", "deliver [3]"]
    assert pair.tokens("d", 4) == ["deliver [4]"]


def test_an_answer_of_decode_that_is_complete_early_waits_too(pair: Driver) -> None:
    assert pair.tokens("d", 2, finish=LENGTH) == []
    assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]", "finish [2] length"]


def test_a_first_token_may_come_before_the_word_that_prefill_is_over(pair: Driver) -> None:
    assert pair.tokens("p", 1) == ["deliver [1]"]
    assert pair.tokens("d", 2) == ["deliver [2]"]
    assert pair.tokens("p", finish=LENGTH) == ["deliver []"]
    assert pair.tokens("d", 3, finish=STOP) == ["finish [3] stop"]


def test_an_answer_can_end_at_its_first_token(pair: Driver) -> None:
    assert pair.tokens("p", 1, finish=STOP) == ["finish [1] stop", "cancel d"]
    assert pair.tokens("d", 2) == [], "what decode still sends is stale"
    assert pair.error("d", TransferFailed("the blocks are freed")) == []


def test_the_failed_transfer_that_an_end_at_the_first_token_causes_is_no_failure(
    pair: Driver,
) -> None:
    assert pair.error("d", TransferFailed("the blocks are freed")) == []
    assert pair.tokens("p", 1, finish=STOP) == ["finish [1] stop", "cancel d"]
    assert pair.handoff.fallbacks == []


@pytest.mark.parametrize("early", [True, False])
def test_a_failed_transfer_is_tried_again(pair: Driver, early: bool) -> None:
    failed = TransferFailed("no blocks")
    again = "same_prefill p after [1] avoiding d"
    if early:
        assert pair.error("d", failed) == []
        assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]", "cancel p", again]
    else:
        assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]"]
        # The prefill has ended, and still holds its blocks for a decode that will not come.
        assert pair.error("d", failed) == ["cancel p", again]
    pair.legs["p1"] = pair.legs["p"]
    pair.pair("p", "d2")
    assert pair.tokens("p", 2, finish=LENGTH) == ["deliver [2]"]
    assert pair.tokens("d2", 3, finish=STOP) == ["finish [3] stop"]
    assert pair.handoff.tokens == [1, 2, 3]
    assert pair.handoff.fallbacks == ["same_prefill:transfer_failed"]
    assert pair.handoff.first_token_leg is pair.legs["p1"]


@pytest.mark.parametrize("early", [True, False])
def test_damaged_kv_goes_to_another_pair_after_the_first_token(pair: Driver, early: bool) -> None:
    retry = ["cancel p", "other_prefill after [1] avoiding p"]
    if early:
        assert pair.error("d", CORRUPTED) == []
        assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]", *retry]
    else:
        pair.tokens("p", 1, finish=LENGTH)
        assert pair.error("d", CORRUPTED) == retry
    pair.pair("p2", "d2")
    assert pair.tokens("d2", 3) == [], "tokens that come before the second prefill's wait for it"
    assert pair.tokens("p2", 2, finish=LENGTH) == ["deliver [2]", "deliver [3]"]
    assert pair.tokens("d2", 4, finish=STOP) == ["finish [4] stop"]
    assert pair.handoff.tokens == [1, 2, 3, 4]
    assert pair.handoff.fallbacks == ["other_prefill:transfer_corrupted"]
    assert pair.handoff.first_token_leg is pair.legs["p"]


def test_an_answer_can_end_at_the_second_prefills_token(pair: Driver) -> None:
    pair.tokens("p", 1, finish=LENGTH)
    pair.error("d", CORRUPTED)
    pair.pair("p2", "d2")
    assert pair.tokens("p2", 2, finish=STOP) == ["finish [2] stop", "cancel d2"]


@pytest.mark.parametrize("how", ["damaged again", "the prefill is lost", "no other pair"])
def test_what_another_pair_cannot_bring_is_recomputed(pair: Driver, how: str) -> None:
    pair.tokens("p", 1, finish=LENGTH)
    pair.error("d", CORRUPTED)
    if how == "no other pair":
        assert pair.unplaced() == ["one_worker after [1] avoiding p"]
        pair.whole("d3")
        assert pair.handoff.fallbacks == ["one_worker:transfer_corrupted"]
        return
    pair.pair("p2", "d2")
    if how == "damaged again":
        pair.tokens("p2", 2, finish=LENGTH)
        actions, delivered = pair.error("d2", CORRUPTED), [1, 2]
        again = f"one_worker after {delivered} avoiding p p2"
    else:
        actions, delivered = pair.lost("p2"), [1]
        again = f"one_worker after {delivered} avoiding p p2"
    assert actions[-1] == again
    pair.whole("d3")
    assert pair.tokens("d3", 9, finish=STOP) == ["finish [9] stop"]
    assert pair.handoff.tokens == [*delivered, 9]
    assert len(pair.handoff.fallbacks) == 2


def test_a_pair_is_not_asked_for_the_last_token() -> None:
    """Its prefill would give it, and its decode have nothing to do."""
    driver = Driver(max_tokens=2)
    driver.pair()
    driver.tokens("p", 1, finish=LENGTH)
    assert driver.error("d", CORRUPTED) == ["cancel p", "one_worker after [1] avoiding p"]


def test_a_whole_leg_cannot_say_that_kv_came_damaged() -> None:
    driver = Driver()
    driver.whole("a", Role.AGGREGATED)
    assert driver.error("a", CORRUPTED) == ["other_prefill after [] avoiding a"]


@pytest.mark.parametrize("delivered", [1, 2, 3])
def test_a_decode_worker_that_is_lost_is_replaced(pair: Driver, delivered: int) -> None:
    pair.tokens("p", 1, finish=LENGTH)
    for token in range(2, delivered + 1):
        pair.tokens("d", token)
    so_far = list(range(1, delivered + 1))
    released = ["cancel p"] if delivered == 1 else []
    assert pair.lost("d") == [*released, f"same_prefill p after {so_far} without d"]
    pair.whole("d2")
    assert pair.tokens("d", 99) == [], "the lost worker is not heard again"
    assert pair.tokens("d2", 9, finish=STOP) == ["finish [9] stop"]
    assert pair.handoff.tokens == [*so_far, 9]
    assert pair.handoff.fallbacks == ["one_worker:worker_failed"]


@pytest.mark.parametrize("how", ["lost", "error", "abort"])
def test_prefill_that_fails_is_tried_once_more_on_both_sides(pair: Driver, how: str) -> None:
    pair.tokens("d", 2)
    if how == "lost":
        actions = pair.lost("p")
    elif how == "error":
        actions = pair.error("p", WorkerFailed("dead"))
    else:
        actions = pair.tokens("p", finish=FinishReason.ABORT)
    assert actions == ["cancel d", "other_prefill after [] without p"]
    pair.pair("p2", "d2")
    assert pair.tokens("d", 2) == []
    assert pair.tokens("p2", 11, finish=LENGTH) == ["deliver [11]"], "early tokens are forgotten"
    assert pair.tokens("d2", 12, finish=STOP) == ["finish [12] stop"]
    assert pair.handoff.fallbacks == ["other_prefill:worker_failed"]
    assert pair.handoff.first_token_leg is pair.legs["p2"]


def test_prefill_that_fails_again_is_recomputed_and_then_no_more(pair: Driver) -> None:
    pair.lost("p")
    pair.pair("p2", "d2")
    assert pair.lost("p2") == ["cancel d2", "one_worker after [] avoiding p p2"]
    pair.whole("d3")
    assert pair.lost("d3") == ["fail worker_failed"]
    assert pair.handoff.fallbacks == ["other_prefill:worker_failed", "one_worker:worker_failed"]


def test_the_last_error_names_the_fallbacks(pair: Driver) -> None:
    pair.lost("p")
    pair.pair("p2", "d2")
    pair.lost("p2")
    pair.whole("d3")
    (action,) = pair.handoff.on_lost(pair.legs["d3"], WorkerFailed("d3 is gone"))
    assert isinstance(action, Fail)
    assert action.error.message == (
        "d3 is gone (after other_prefill:worker_failed and one_worker:worker_failed)"
    )


def test_prefill_that_is_lost_after_the_first_token_changes_nothing(pair: Driver) -> None:
    pair.tokens("p", 1)
    assert pair.lost("p") == []
    assert pair.tokens("d", 2, finish=STOP) == ["finish [2] stop"]


def test_both_sides_lost_before_the_first_token_are_retried_as_one(pair: Driver) -> None:
    assert pair.lost("d") == []
    assert pair.lost("p") == ["cancel d", "other_prefill after [] without p"]


def test_a_rung_that_leads_nowhere_is_passed_over(pair: Driver) -> None:
    pair.lost("p")
    assert pair.unplaced() == ["one_worker after [] avoiding p"]
    assert pair.handoff.fallbacks == [], "nothing was done"
    assert pair.unplaced() == ["fail unavailable"]


@pytest.mark.parametrize("leg", ["p", "d"])
@pytest.mark.parametrize(
    "error", [InvalidRequest("bad"), InternalError("bug"), DeadlineExceeded("late")]
)
def test_errors_that_another_worker_would_meet_too_end_the_request(
    pair: Driver, leg: str, error: PdserveError
) -> None:
    other = {"p": "d", "d": "p"}[leg]
    assert pair.error(leg, error) == [f"fail {error.code}", f"cancel {other}"]
    assert pair.handoff.done


def test_prefill_without_a_token_is_a_bug_and_not_an_answer(pair: Driver) -> None:
    assert pair.tokens("p", finish=LENGTH) == ["fail internal_error", "cancel d"]


def test_a_worker_lost_after_the_last_token_costs_nothing() -> None:
    driver = Driver(max_tokens=2)
    driver.pair()
    driver.tokens("p", 1, finish=LENGTH)
    driver.tokens("d", 2)
    assert driver.lost("d") == ["finish [] length"]
    assert driver.handoff.fallbacks == []


def test_an_aggregated_answer() -> None:
    driver = Driver()
    driver.whole("a", Role.AGGREGATED)
    assert driver.tokens("a", 1) == ["deliver [1]"]
    assert driver.tokens("a", 2, finish=LENGTH) == ["finish [2] length"]
    assert driver.handoff.first_token_leg is driver.legs["a"]


def test_an_aggregated_worker_that_is_lost_is_replaced() -> None:
    driver = Driver()
    driver.whole("a", Role.AGGREGATED)
    assert driver.lost("a") == ["other_prefill after [] without a"]
    driver.whole("b", Role.AGGREGATED)
    driver.tokens("b", 1)
    assert driver.lost("b") == ["one_worker after [1] avoiding a b"]
    driver.whole("c", Role.AGGREGATED)
    assert driver.tokens("c", 2, finish=STOP) == ["finish [2] stop"]
    assert driver.handoff.first_token_leg is driver.legs["b"]


@pytest.mark.parametrize(
    ("events", "cancels"),
    [
        ([], ["cancel p", "cancel d"]),
        ([("d", 2, None)], ["cancel p", "cancel d"]),
        ([("p", 1, None)], ["cancel p", "cancel d"]),
        ([("p", 1, LENGTH)], ["cancel p", "cancel d"]),
        ([("p", 1, LENGTH), ("d", 2, None)], ["cancel d"]),
        ([("p", 1, LENGTH), ("d", 2, STOP)], []),
        ([("p", 1, STOP)], []),
    ],
)
def test_leaving_cancels_what_is_open(
    pair: Driver, events: list[tuple[str, int, FinishReason | None]], cancels: list[str]
) -> None:
    for leg, token, finish in events:
        pair.tokens(leg, token, finish=finish)
    assert pair.abandon() == cancels
    assert pair.abandon() == []
    assert pair.tokens("d", 9, finish=STOP) == []
    assert pair.lost("p") == []


def leave(driver: Driver, worker_id: str) -> list[str] | None:
    resubmit = driver.handoff.leaving(worker_id, Unavailable("it drains"))
    return None if resubmit is None else driver._say([*driver.handoff.leave(resubmit), resubmit])


@pytest.mark.parametrize("worker_id", ["p", "d"])
def test_an_answer_leaves_a_worker_that_is_well(pair: Driver, worker_id: str) -> None:
    pair.tokens("d", 2)
    assert leave(pair, worker_id) == [
        "cancel p",
        "cancel d",
        f"other_prefill after [] without {worker_id}",
    ]
    pair.pair("p2", "d2")
    assert pair.tokens("d", 2) == [], "what the old one still sends is stale"
    pair.tokens("p2", 1, finish=LENGTH)
    assert pair.tokens("d2", 2, finish=STOP) == ["finish [2] stop"]
    assert pair.handoff.fallbacks == ["other_prefill:moved"]


def test_an_answer_does_not_leave_where_it_is_not_or_is_as_good_as_done(pair: Driver) -> None:
    assert leave(pair, "p9") is None
    pair.tokens("p", 1, finish=LENGTH)
    pair.tokens("d", *range(2, 8))
    assert leave(pair, "p") is None, "decode has taken its blocks"
    assert leave(pair, "d") is None, "one token is missing"
    assert pair.tokens("d", 8, finish=LENGTH) == ["finish [8] length"]


def test_leaving_is_no_failure_however_often() -> None:
    driver = Driver(max_tokens=100, limits=LadderLimits(max_fallbacks=1))
    driver.whole("w0")
    for number in range(5):
        driver.tokens(f"w{number}", number)
        assert leave(driver, f"w{number}") is not None
        driver.whole(f"w{number + 1}")
    assert driver.lost("w5")[-1].startswith("other_prefill")


class Play:
    """Workers that count: each sends the token that follows those it was told of."""

    def __init__(self, style: HandoffStyle) -> None:
        self.style = style
        self.driver = Driver(max_tokens=100)
        self.handoff = self.driver.handoff
        self.delivered: list[int] = []
        self.ends = 0
        self.current: dict[str, str] = {}
        self.following: dict[str, int] = {}
        self._pair("0")

    def _pair(self, suffix: str, resumed: int = 0) -> None:
        self.driver.pair(f"p{suffix}", f"d{suffix}", self.style)
        self.current = {"p": f"p{suffix}"}
        self.following[f"p{suffix}"] = resumed + 1
        if self.style is HandoffStyle.CONCURRENT:
            self._decode(f"d{suffix}", resumed + 1)

    def _decode(self, name: str, resumed: int) -> None:
        self.current["d"] = name
        self.following[name] = resumed + 1

    def event(self, kind: str, what: str) -> None:
        name = self.current.get(kind)
        if name is None:
            return
        if what in ("export", "late"):
            self._ask(self.driver.legs[name], what)
            return
        if what != "nothing" and (what != "token" or kind == "p"):
            # It was that stream's last word; prefill has but one.
            del self.current[kind]
        leg = self.driver.legs[name]
        if what == "token" and self.handoff.goes_on(leg, self.following[name]):
            self.delivered.append(self.following[name])
            self.following[name] += 1
            return
        if what == "lost":
            actions = self.handoff.on_lost(leg, WorkerFailed("gone"))
        else:
            actions = self.handoff.on_delta(leg, self._delta(name, what))
        for action in actions:
            self._perform(action)

    def _ask(self, leg: Leg, what: str) -> None:
        if what == "export" and self.handoff.exportable(leg.worker_id) is leg:
            self.handoff.export(leg)
        for action in self.handoff.export_late() if what == "late" else ():
            self._perform(action)

    def _delta(self, name: str, what: str) -> StreamDelta:
        if what == "nothing":
            return StreamDelta(1)
        if what == "exported":
            count = self.following[name] - 1
            return StreamDelta(1, finish_reason=FinishReason.ABORT, exported_tokens=count)
        if what in ("token", "length", "stop"):
            finish = {"token": None, "length": LENGTH, "stop": STOP}[what]
            self.following[name] += 1
            token_ids = (self.following[name] - 1,)
            handle = b"kv" if what == "length" and name.startswith("p") else b""
            return StreamDelta(1, token_ids, finish_reason=finish, kv_handle=handle)
        return StreamDelta(1, finish_reason=FinishReason.ERROR, error=ErrorInfo(what, what))

    def _perform(self, action: Action) -> None:
        match action:
            case Deliver(delta):
                self.delivered += delta.token_ids
            case Finish(delta):
                self.delivered += delta.token_ids
                self.ends += 1
            case Fail():
                self.ends += 1
            case SubmitDecode(leg, _, resume):
                self._decode(leg.worker_id, len(resume))
            case TakeOver(resume):
                name = f"d{len(self.handoff.legs)}"
                self.driver.live(name, "source")
                self._decode(name, len(resume))
            case Resubmit(rung, resume):
                name = str(len(self.handoff.legs))
                if rung.step is not Step.ONE_WORKER:
                    self._pair(name, len(resume))
                else:
                    self.driver.whole(f"w{name}")
                    self.current = {"w": f"w{name}"}
                    self.following[f"w{name}"] = len(resume) + 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("pdw"),
            st.sampled_from(
                [
                    *("token", "length", "stop", "lost", "invalid_value", "nothing"),
                    *("transfer_failed", "transfer_corrupted", "unavailable"),
                    *("export", "exported", "late"),
                ]
            ),
        ),
        max_size=14,
    ),
    st.sampled_from(HandoffStyle),
)
def test_whatever_happens_no_token_is_repeated_and_no_answer_is_forgotten(
    events: list[tuple[str, str]], style: HandoffStyle
) -> None:
    play = Play(style)
    for kind, what in events:
        play.event(kind, what)
    handoff = play.handoff
    assert play.delivered == list(range(1, len(play.delivered) + 1)) == handoff.tokens
    failures = [name for name in handoff.fallbacks if not name.endswith(":moved")]
    assert len(failures) <= len(Step), "no answer here gets on by much"
    assert play.ends == (1 if handoff.done else 0)
    if not handoff.done:
        assert any(leg.open for leg in handoff.legs), "nobody is left who could end the answer"
    handoff.abandon()
    assert not any(leg.open for leg in handoff.legs)
