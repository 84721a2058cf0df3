"""The order of the streams of one attempt: sequences of events, and what is done about each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PdserveError,
    TransferFailed,
    WorkerFailed,
)
from pdserve.types import ErrorInfo, FinishReason, HandoffStyle, PhaseReport, Role, StreamDelta
from router.handoff import (
    Action,
    Exported,
    Failed,
    Finished,
    Handoff,
    Phase,
    StreamState,
    SubmitDecode,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Driver:
    """A handoff whose actions read as text. Its streams are "p" and "d", or "a" alone."""

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
        producer = None
        if exported_by:
            producer = StreamState(Phase.DECODE, exported_by, Role.DECODE, False, None, True)
        self.producer = producer
        self.handoff = Handoff(
            max_tokens,
            tokens if tokens is not None else [],
            self.streams[names[-1]],
            self.streams.get("p"),
            producer,
            style,
        )

    def tokens(
        self, name: str, *token_ids: int, finish: FinishReason | None = None, handle: bytes = b""
    ) -> list[str]:
        report = None if finish is None else PhaseReport()
        return self.delta(
            name, StreamDelta(1, token_ids, finish_reason=finish, report=report, kv_handle=handle)
        )

    def delta(self, name: str, delta: StreamDelta) -> list[str]:
        return self._say(self.handoff.on_delta(self.streams[name], delta))

    def error(self, name: str, error: PdserveError) -> list[str]:
        info = ErrorInfo(error.code, error.message)
        return self.delta(name, StreamDelta(1, finish_reason=FinishReason.ERROR, error=info))

    def lost(self, name: str) -> list[str]:
        return self._say(self.handoff.on_lost(self.streams[name], WorkerFailed("gone")))

    def export(self, worker_id: str = "d") -> bool:
        stream = self.handoff.exportable(worker_id)
        if stream is not None:
            self.handoff.export(stream)
        return stream is not None

    def exported(self, name: str, tokens: int) -> list[str]:
        return self.delta(
            name, StreamDelta(1, finish_reason=FinishReason.ABORT, exported_tokens=tokens)
        )

    def _say(self, actions: object) -> list[str]:
        return [_name(action) for action in actions]  # type: ignore[attr-defined]


def _name(action: Action) -> str:
    match action:
        case StreamDelta():
            return f"deliver {list(action.token_ids)}"
        case Finished(delta, reason):
            return f"finished {list(delta.token_ids)} {reason}"
        case Failed(stream, error, was_moving):
            return f"failed {stream.worker_id} {error.code}{' moving' if was_moving else ''}"
        case SubmitDecode(handle):
            return f"submit decode {handle.decode()}"
        case Exported(stream):
            return f"exported {stream.worker_id}"


@pytest.fixture
def pair() -> Driver:
    return Driver()


@pytest.fixture
def sequential() -> Driver:
    return Driver(style=HandoffStyle.SEQUENTIAL)


def test_prefill_samples_first_and_decode_continues(pair: Driver) -> None:
    assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]"]
    assert pair.tokens("d", 2) == ["deliver [2]"]
    assert pair.tokens("d", 3, 4) == ["deliver [3, 4]"]
    assert pair.tokens("d", 5, finish=STOP) == ["finished [5] stop"]
    assert pair.handoff.tokens == [1, 2, 3, 4, 5]


def test_a_token_is_accepted_only_if_it_changes_no_state(pair: Driver) -> None:
    handoff, prefill, decode = pair.handoff, pair.streams["p"], pair.streams["d"]
    assert not handoff.accepts(decode, 2), "it waits for the first token"
    pair.tokens("p", 1, finish=LENGTH)
    assert not handoff.accepts(decode, 2), "it proves that decode has the KV"
    pair.tokens("d", 2)
    assert not prefill.holds_kv
    assert handoff.accepts(decode, 3)
    assert not handoff.accepts(prefill, 4), "it has ended"
    pair.tokens("d", finish=STOP)
    assert not handoff.accepts(decode, 4)
    assert handoff.tokens == [1, 2, 3]


def test_what_decode_sends_early_waits_for_the_first_token(pair: Driver) -> None:
    assert pair.tokens("d", 2) == pair.tokens("d", 3, finish=LENGTH) == []
    assert pair.tokens("p", 1, finish=LENGTH) == [
        "deliver [1]",
        "deliver [2]",
        "finished [3] length",
    ]


def test_an_answer_can_end_with_the_first_token(pair: Driver) -> None:
    assert pair.error("d", TransferFailed("the blocks are freed")) == []
    assert pair.tokens("p", 1, finish=STOP) == ["finished [1] stop"]
    assert pair.tokens("d", 2) == [], "it is stale"


@pytest.mark.parametrize("early", [True, False])
def test_a_failed_transfer_ends_the_attempt_after_the_first_token(
    pair: Driver, early: bool
) -> None:
    failed = "failed d transfer_failed"
    if early:
        assert pair.error("d", TransferFailed("no blocks")) == []
        assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]", failed]
    else:
        assert pair.tokens("p", 1, finish=LENGTH) == ["deliver [1]"]
        assert pair.error("d", TransferFailed("no blocks")) == [failed]
    assert pair.streams["p"].holds_kv, "nobody has fetched it"


@pytest.mark.parametrize("how", ["lost", "error", "abort"])
def test_prefill_that_fails_ends_the_attempt(pair: Driver, how: str) -> None:
    pair.tokens("d", 2)
    if how == "lost":
        actions = pair.lost("p")
    elif how == "error":
        actions = pair.error("p", WorkerFailed("dead"))
    else:
        actions = pair.tokens("p", finish=FinishReason.ABORT)
    assert actions == ["failed p worker_failed"]
    assert pair.handoff.tokens == [], "the early token was not delivered"


def test_prefill_that_is_lost_after_the_first_token_changes_nothing(pair: Driver) -> None:
    pair.tokens("p", 1)
    assert pair.lost("p") == []
    assert pair.tokens("d", 2, finish=STOP) == ["finished [2] stop"]


@pytest.mark.parametrize("name", ["p", "d"])
@pytest.mark.parametrize(
    "error", [InvalidRequest("bad"), InternalError("bug"), DeadlineExceeded("late")]
)
def test_errors_that_are_not_retryable_end_the_attempt_at_once(
    pair: Driver, name: str, error: PdserveError
) -> None:
    assert pair.error(name, error) == [f"failed {name} {error.code}"]


def test_prefill_without_a_token_is_a_bug(pair: Driver) -> None:
    assert pair.tokens("p", finish=LENGTH) == ["failed p internal_error"]


def test_a_worker_that_is_lost_after_the_last_token_costs_nothing() -> None:
    driver = Driver(max_tokens=2)
    driver.tokens("p", 1, finish=LENGTH)
    driver.tokens("d", 2)
    assert driver.lost("d") == ["finished [] length"]


def test_one_worker_does_both_phases() -> None:
    driver = Driver("a", tokens=[1])
    assert driver.tokens("a", 2) == ["deliver [2]"]
    assert driver.lost("a") == ["failed a worker_failed"]
    assert driver.handoff.tokens == [1, 2]


class TestSequential:
    def test_decode_is_submitted_when_prefill_has_ended(self, sequential: Driver) -> None:
        actions = sequential.tokens("p", 1, finish=LENGTH, handle=b"kv")
        assert actions == ["deliver [1]", "submit decode kv"]
        assert sequential.streams["p"].holds_kv
        assert sequential.tokens("d", 2) == ["deliver [2]"]
        assert not sequential.streams["p"].holds_kv

    def test_decode_is_not_submitted_if_the_answer_ends(self, sequential: Driver) -> None:
        assert sequential.tokens("p", 1, finish=STOP) == ["finished [1] stop"]

    def test_prefill_that_kept_no_kv_is_a_failed_transfer(self, sequential: Driver) -> None:
        actions = sequential.tokens("p", 1, finish=LENGTH)
        assert actions == ["deliver [1]", "failed d transfer_failed"]

    def test_prefill_that_is_lost_before_its_end_fails(self, sequential: Driver) -> None:
        sequential.tokens("p", 1)
        assert sequential.lost("p") == ["failed p worker_failed"]


class TestExport:
    def started(self) -> Driver:
        driver = Driver()
        driver.tokens("p", 1, finish=LENGTH)
        driver.tokens("d", 2)
        return driver

    def test_a_stream_is_exported_after_its_last_tokens(self) -> None:
        driver = self.started()
        assert driver.export()
        assert not driver.export(), "once"
        assert driver.tokens("d", 3) == ["deliver [3]"]
        assert driver.exported("d", 3) == ["exported d"]
        assert driver.streams["d"].holds_kv

    def test_the_next_attempt_frees_the_kv_when_decode_speaks(self) -> None:
        driver = Driver("d", tokens=[1, 2, 3], exported_by="old")
        assert not driver.export()
        assert not driver.handoff.uses("d"), "its KV is on the way"
        assert driver.tokens("d", 4) == ["deliver [4]"]
        assert driver.producer is not None
        assert not driver.producer.holds_kv
        assert driver.handoff.uses("d")

    @pytest.mark.parametrize("tokens", [2, 4])
    def test_tokens_that_are_missing_fail_the_move(self, tokens: int) -> None:
        driver = self.started()
        driver.tokens("d", 3)
        assert driver.export()
        assert driver.exported("d", tokens) == ["failed d unavailable moving"]

    def test_a_worker_that_does_not_export_in_time_fails_the_move(self) -> None:
        driver = self.started()
        assert driver.export()
        assert driver._say(driver.handoff.on_export_timeout()) == ["failed d unavailable moving"]
        assert driver._say(driver.handoff.on_export_timeout()) == []

    def test_an_end_that_comes_first_is_an_end(self) -> None:
        driver = self.started()
        assert driver.export()
        assert driver.tokens("d", 3, finish=STOP) == ["finished [3] stop"]
        driver = self.started()
        assert driver.export()
        assert driver.lost("d") == ["failed d worker_failed"]

    def test_only_a_settled_stream_with_tokens_left_is_exported(self) -> None:
        driver = Driver(max_tokens=3)
        assert not driver.export()
        driver.tokens("p", 1, finish=LENGTH)
        assert not driver.export(), "its KV is on the way"
        driver.tokens("d", 2)
        assert not driver.export(), "one token is missing"
        assert not self.started().export("p")


def test_an_attempt_leaves_only_a_worker_that_it_uses(pair: Driver) -> None:
    assert pair.handoff.uses("p")
    assert not pair.handoff.uses("p9")
    pair.tokens("p", 1, finish=LENGTH)
    assert pair.handoff.uses("p"), "it holds the KV"
    pair.tokens("d", 2)
    assert not pair.handoff.uses("p")
    pair.tokens("d", *range(3, 8))
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
            self.driver.export(name)
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
        if what == "nothing":
            return StreamDelta(1)
        if what == "exported":
            count = self.next[name] - 1
            return StreamDelta(1, finish_reason=FinishReason.ABORT, exported_tokens=count)
        if what in ("token", "length", "stop"):
            finish = {"token": None, "length": LENGTH, "stop": STOP}[what]
            self.next[name] += 1
            handle = b"kv" if name == "p" and what == "length" else b""
            token_ids = (self.next[name] - 1,)
            return StreamDelta(1, token_ids, finish_reason=finish, kv_handle=handle)
        return StreamDelta(1, finish_reason=FinishReason.ERROR, error=ErrorInfo(what, what))

    def perform(self, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]
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
