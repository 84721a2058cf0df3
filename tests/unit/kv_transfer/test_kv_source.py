"""The sending end's decisions, event by event and state by state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.kv_transfer.source_states import (
    ABORTED,
    BEFORE,
    CANCELLED,
    CHUNK,
    DONE,
    EVENTS,
    EXPIRED,
    NOT_YOURS,
    RELEASE,
    SHORT,
    TWICE,
    State,
    cancelled,
    copy,
    copying,
    early,
    end,
    expected,
    fail,
    granted,
    held,
    new_table,
    pushed,
    released,
    sent,
    unknown,
    unwanted,
)

# state → event → what must be done; an event that is not named asks for nothing.
TABLE: dict[State, dict[str, list[Any]]] = {
    unknown: {
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
        "end held": [RELEASE],
    },
    early: {
        "grant": [BEFORE],
        "grant elsewhere": [fail("the transfer was granted before", "M")],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
        "end held": [RELEASE],
        "lease over": [fail("unknown transfer")],
    },
    expected: {
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
    granted: {
        "expect": [TWICE],
        "grant": [BEFORE],
        "grant elsewhere": [fail("the transfer was granted before", "M")],
        "progress": [CHUNK],
        "end held": [SHORT, RELEASE],
        "end aborted": [ABORTED],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
    pushed: {
        "expect": [TWICE],
        "grant": [BEFORE],
        "grant elsewhere": [fail("the transfer was granted before", "M")],
        "end held": [DONE],
        "end aborted": [ABORTED],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
    copying: {
        "expect": [TWICE],
        "grant": [BEFORE],
        "grant elsewhere": [fail("the transfer was granted before", "M")],
        "end held": [DONE],
        "end aborted": [ABORTED],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
    held: {
        "expect": [RELEASE],
        "grant": [SHORT, RELEASE],
        "grant elsewhere": [fail("10 tokens were granted and 0 computed", "M"), RELEASE],
        "cancel": [CANCELLED, RELEASE],
        "cancel elsewhere": [NOT_YOURS, RELEASE],
        "lease over": [RELEASE],
    },
    sent: {
        "expect": [TWICE, RELEASE],
        "grant": [BEFORE],
        "grant elsewhere": [fail("the transfer was granted before", "M")],
        "cancel": [CANCELLED, RELEASE],
        "cancel elsewhere": [NOT_YOURS],
        "ack": [RELEASE],
        "link down": [RELEASE],
        "lease over": [EXPIRED, RELEASE],
    },
    cancelled: {
        "grant": [CANCELLED],
        "grant elsewhere": [NOT_YOURS],
        "end held": [RELEASE],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
    unwanted: {
        "grant": [CANCELLED],
        "grant elsewhere": [NOT_YOURS],
        "end held": [RELEASE],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
    released: {
        "grant": [fail("finished")],
        "grant elsewhere": [fail("finished", "M")],
        "end held": [RELEASE],
        "cancel": [CANCELLED],
        "cancel elsewhere": [NOT_YOURS],
    },
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", TABLE, ids=lambda s: s.__name__)
def test_every_event_in_every_state(state: State, event: str) -> None:
    table = new_table()
    state(table)
    assert EVENTS[event](table) == TABLE[state].get(event, [])


@pytest.mark.parametrize("first", EVENTS)
@pytest.mark.parametrize("state", [s for s in TABLE if s not in (unknown, early, released)])
def test_whatever_happens_a_request_is_released_once_at_most_and_nothing_stays(
    state: State, first: str
) -> None:
    """From each state: the event, the end of a running copy, the engine's end, the lease's end."""
    table = new_table()
    actions = state(table)
    actions += EVENTS[first](table)
    still = CHUNK if state is copying else None
    if still is not None:
        actions += table.end_copy(still, 1.0, 0.5, copied=True)
    was_held = state in (held, sent)
    ended = was_held or first.startswith("end")
    if not ended:
        actions += end(table, 2.0)
    actions += copy(table, actions, 3.0) + table.tick(100.0)
    # An expectation after the release is a new request, for which this test has no end.
    if not (first == "expect" and len(table)):
        assert len(table) == 0, repr(table)
    releases = actions.count(RELEASE)
    assert releases == (0 if first == "end aborted" and not was_held else 1)
