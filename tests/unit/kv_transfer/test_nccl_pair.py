"""One end of a pair by itself: what each event does in each state, and that every state ends."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kv_transfer.nccl.actions import (
    AbortComm,
    Destroy,
    Finalise,
    Finished,
    Lost,
    MakeId,
    Op,
    PairTimeouts,
    Post,
    Tell,
)
from kv_transfer.nccl.messages import Abort, Clear, Finish, Identify, Offer
from kv_transfer.nccl.pair import LIVE, RECEIVER, SENDER, Pair, PairState

OP = Op("t:0", 4096, 64, 1000.0)
TIMEOUTS = PairTimeouts()
UID = b"u" * 128
ALIVE: list[PairState] = [state for state in PairState if state in LIVE]


def make(rank: int) -> Pair:
    return Pair(rank, TIMEOUTS, itertools.count(1).__next__, lambda unique_id: True)


def sender(state: PairState, *, is_posted: bool = True) -> Pair:
    """A sender that was brought to `state` by events, at time 0."""
    pair = make(SENDER)
    if state is PairState.ABSENT:
        return pair
    pair.submit(OP)
    pair.open(0.0)
    if state is PairState.INITIALISING:
        return pair
    pair.ready(0.0)
    pair.start(0.0)
    if is_posted:
        pair.told(Clear(1, "t:0"), 0.0)
    if state is PairState.BUSY:
        return pair
    if state in (PairState.ABORTING, PairState.QUARANTINED):
        pair.failed("broken", 0.0)
        if state is PairState.QUARANTINED:
            pair.aborted(0.0)
        return pair
    pair.completed(0.0)
    if state is PairState.FINALISING:
        pair.close(0.0)
    return pair


def receiver() -> Pair:
    """READY."""
    pair = make(RECEIVER)
    pair.told(Identify(1, UID), 0.0)
    pair.open(0.0)
    pair.ready(0.0)
    return pair


@pytest.mark.parametrize("state", [s for s in PairState if s is not PairState.GONE])
def test_events_lead_to_every_state(state: PairState) -> None:
    assert sender(state).state is state


@pytest.mark.parametrize(
    "state", [s for s in PairState if s not in (PairState.ABSENT, PairState.GONE)]
)
def test_every_state_that_holds_a_communicator_has_a_deadline_and_leaves_at_it(
    state: PairState,
) -> None:
    pair = sender(state)
    assert pair.deadline is not None
    assert pair.tick(pair.deadline - 0.001) == []
    assert pair.state is state
    assert pair.tick(pair.deadline) != []
    assert pair.state is not state


@pytest.mark.parametrize("state", ALIVE)
def test_a_failure_aborts_and_tells_the_peer(state: PairState) -> None:
    pair = sender(state)
    assert pair.failed("broken", 0.0) == [Tell(Abort(1, "broken")), AbortComm()]
    assert pair.state is PairState.ABORTING


@pytest.mark.parametrize("state", ALIVE)
def test_a_peers_abort_is_not_answered(state: PairState) -> None:
    assert sender(state).told(Abort(1, "broken"), 0.0) == [AbortComm()]


@pytest.mark.parametrize("state", [s for s in PairState if s not in LIVE])
def test_where_there_is_no_communicator_nothing_fails(state: PairState) -> None:
    pair = make(SENDER) if state is PairState.GONE else sender(state)
    if state is PairState.GONE:
        pair.close(0.0)
    assert pair.failed("broken", 0.0) == []
    assert pair.told(Abort(1, "broken"), 0.0) == []
    assert pair.state is state


def test_an_operation_ends_once() -> None:
    pair = sender(PairState.BUSY)
    assert pair.completed(0.0) == [Finished(OP)]
    assert pair.completed(0.0) == []
    assert pair.told(Clear(1, "t:0"), 0.0) == []


def test_what_was_not_posted_cannot_complete() -> None:
    pair = sender(PairState.BUSY, is_posted=False)
    assert pair.completed(0.0) == []
    assert pair.told(Clear(1, "another"), 0.0) == []
    assert pair.told(Clear(1, "t:0"), 0.0) == [Post(OP)]
    assert pair.told(Clear(1, "t:0"), 0.0) == []


def test_the_memory_is_given_back_when_the_stream_is_idle_and_not_before() -> None:
    pair = sender(PairState.BUSY)
    pair.peer_lost("the link is down", 0.0)
    assert pair.aborted(1.0) == []
    assert pair.idle(1.0) == [Finished(OP, "the link is down")]
    assert pair.state is PairState.GONE


def test_memory_that_does_not_come_to_rest_is_lost() -> None:
    pair = sender(PairState.QUARANTINED)
    lost = pair.tick(TIMEOUTS.quarantine_s)
    assert [type(action) for action in lost] == [Lost]
    assert pair.state is PairState.GONE


def test_a_second_failure_ends_it() -> None:
    pair = sender(PairState.QUARANTINED)
    assert pair.idle(1.0) == []
    assert pair.wants_open
    assert pair.open(1.0) == [MakeId(2)]
    pair.failed("broken again", 1.0)
    pair.aborted(1.0)
    assert pair.idle(1.0) == [Finished(OP, "broken again")]
    assert pair.submit(OP) == [Finished(OP, "broken again")]


def test_an_operation_whose_time_is_over_is_not_tried_again() -> None:
    pair = sender(PairState.QUARANTINED)
    assert pair.idle(OP.expires_at) == [Finished(OP, "broken")]
    assert pair.state is PairState.GONE


def test_a_success_forgives_an_earlier_failure() -> None:
    pair = sender(PairState.QUARANTINED)
    pair.idle(1.0)
    pair.open(1.0)
    pair.ready(1.0)
    pair.start(1.0)
    pair.told(Clear(2, "t:0"), 1.0)
    assert pair.completed(1.0) == [Finished(OP)]
    pair.submit(OP)
    pair.failed("broken", 2.0)
    pair.aborted(2.0)
    assert pair.idle(2.0) == []
    assert pair.wants_open


def test_a_pair_that_somebody_waits_for_is_not_closed() -> None:
    pair = receiver()
    pair.submit(OP)
    assert pair.close(0.0) == []
    assert pair.tick(TIMEOUTS.idle_s) == []
    assert pair.state is PairState.READY
    assert sender(PairState.BUSY).close(0.0) == []


def test_an_unused_pair_closes_in_order() -> None:
    pair = receiver()
    assert pair.close(0.0) == [Tell(Finish(1)), Finalise()]
    assert pair.told(Finish(1), 0.0) == []
    assert pair.finalised(0.0) == [Destroy()]
    assert pair.state is PairState.GONE


def test_an_offer_that_crosses_the_peers_finish_is_made_again_and_is_no_failure() -> None:
    pair = sender(PairState.BUSY, is_posted=False)
    assert pair.told(Finish(1), 0.0) == [Finalise()]
    assert pair.finalised(0.0) == [Destroy()]
    assert pair.open(0.0) == [MakeId(2)]
    pair.ready(0.0)
    assert pair.start(0.0) == [Tell(Offer(2, "t:0", 64))]
    pair.failed("broken", 0.0)
    pair.aborted(0.0)
    assert pair.idle(0.0) == []  # the first failure: there is a second try


def test_a_finish_that_comes_before_our_end_of_the_operation_waits_for_it() -> None:
    pair = receiver()
    pair.submit(OP)
    pair.told(Offer(1, "t:0", 64), 0.0)
    assert pair.start(0.0) == [Post(OP), Tell(Clear(1, "t:0"))]
    assert pair.told(Finish(1), 0.0) == []
    assert pair.completed(0.0) == [Finished(OP), Finalise()]


def test_an_aborted_invitation_is_not_followed() -> None:
    pair = make(RECEIVER)
    pair.told(Identify(1, UID), 0.0)
    assert pair.wants_open
    pair.told(Abort(1, "too late"), 0.0)
    assert pair.open(0.0) == []


def test_an_invitation_during_an_abort_is_followed_after_it() -> None:
    pair = receiver()
    pair.submit(OP)
    pair.failed("broken", 0.0)
    assert pair.told(Identify(2, b"v" * 128), 0.0) == []
    assert not pair.wants_open
    pair.aborted(0.0)
    assert pair.idle(0.0) == []
    pair.open(0.0)
    assert pair.generation == 2


def test_an_invitation_that_cannot_be_followed_is_answered() -> None:
    pair = receiver()
    pair.submit(OP)
    pair.told(Identify(2, b"v" * 128), 0.0)
    actions = pair.tick(OP.expires_at)  # the abort did not return
    assert Tell(Abort(2, pair.reason)) in actions
    assert pair.state is PairState.GONE


def test_a_second_offer_at_once_is_a_failure() -> None:
    pair = receiver()
    pair.submit(OP)
    pair.told(Offer(1, "t:0", 64), 0.0)
    pair.start(0.0)
    assert pair.told(Offer(1, "t:0", 64), 0.0) == []
    assert pair.told(Offer(1, "t:1", 64), 0.0) == []
    assert AbortComm() in pair.told(Offer(1, "t:2", 64), 0.0)


def test_the_next_offer_may_come_before_an_operations_end_is_seen() -> None:
    """The sender's event fires first; the receiver takes the offer when its own has fired."""
    pair, later = receiver(), replace(OP, op_id="t:1")
    pair.submit(OP)
    pair.submit(later)
    pair.told(Offer(1, "t:0", 64), 0.0)
    pair.start(0.0)
    assert pair.told(Offer(1, "t:1", 64), 0.0) == []
    assert not pair.wants_start
    assert pair.completed(0.0) == [Finished(OP)]
    assert pair.start(0.0) == [Post(later), Tell(Clear(1, "t:1"))]


def test_the_time_for_an_operation_grows_with_its_bytes() -> None:
    assert TIMEOUTS.move_s(1) == TIMEOUTS.move_floor_s
    assert TIMEOUTS.move_s(10**9) == pytest.approx(10.0)
