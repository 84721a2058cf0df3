"""States that a sending end can be in, how it gets there, and what can happen to it."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.messages import Grant
from kv_transfer.protocol.plan import Shard
from kv_transfer.source import SourceTable
from kv_transfer.source_actions import (
    PushChunk,
    Release,
    SendAlive,
    SendDone,
    SendFail,
    SourceAction,
)

BLOCK = 4
SHARD = Shard(1, 16 * BLOCK, BLOCK)
LEASE_S = 30.0
WAIT_S = 20.0
ALIVE_S = 5.0
BLOCKS = [10, 11, 12]
GRANT = Grant("t", 0, 10, [20, 21, 22])  # ten tokens: the third block is partial

Table = SourceTable[str]
Actions = list[SourceAction[str]]


def new_table(chunk_blocks: int = 8, publish_blocks: int = 0) -> Table:
    return SourceTable(
        shard=SHARD,
        chunk_blocks=chunk_blocks,
        lease_s=LEASE_S,
        grant_wait_s=WAIT_S,
        alive_s=ALIVE_S,
        publish_blocks=publish_blocks,
    )


def end(table: Table, now: float = 0.0, *, held: bool = True, request_id: str = "r") -> Actions:
    return table.end("t", (7,), now, held=held, request_id=request_id)


def copy(table: Table, actions: Actions, now: float = 0.0) -> Actions:
    """The writer's part for every chunk and Done among the actions."""
    out: Actions = []
    for action in actions:
        if isinstance(action, PushChunk) and table.begin_copy(action):
            out += table.end_copy(action, now, 0.5, copied=True)
        if isinstance(action, SendDone):
            table.done_figures(action, now)
    return out


def expected(table: Table) -> Actions:
    return table.expect("t", "r", 0.0)


def granted(table: Table) -> Actions:
    return expected(table) + table.grant("L", GRANT, 0.0)


def early(table: Table) -> Actions:
    return table.grant("L", GRANT, 0.0)


def computed(table: Table) -> Actions:
    granted(table)
    return table.progress("t", BLOCKS, 10, 0.0)


def pushed(table: Table) -> Actions:
    return copy(table, computed(table))


def copying(table: Table) -> Actions:
    chunks = computed(table)
    assert isinstance(chunks[0], PushChunk)
    assert table.begin_copy(chunks[0])
    return []


def held(table: Table) -> Actions:
    expected(table)
    return end(table)


def sent(table: Table) -> Actions:
    pushed(table)
    return copy(table, end(table))


def cancelled(table: Table) -> Actions:
    granted(table)
    return table.cancel("L", "t")


def unwanted(table: Table) -> Actions:
    expected(table)
    return table.cancel("L", "t")


def released(table: Table) -> Actions:
    sent(table)
    return table.ack("L", "t")


def unknown(table: Table) -> Actions:
    return []


RELEASE = Release("r")


def fail(reason: str, link: str = "L") -> SendFail[str]:
    return SendFail(link, "t", reason)


State = Callable[[Table], Actions]
Event = Callable[[Table], Actions]
EVENTS: dict[str, Event] = {
    "expect": lambda t: t.expect("t", "r", 1.0),
    "grant": lambda t: t.grant("L", GRANT, 1.0),
    "grant elsewhere": lambda t: t.grant("M", GRANT, 1.0),
    "progress": lambda t: t.progress("t", BLOCKS, 10, 1.0),
    "end held": lambda t: end(t, 1.0),
    "end aborted": lambda t: end(t, 1.0, held=False),
    "cancel": lambda t: t.cancel("L", "t"),
    "cancel elsewhere": lambda t: t.cancel("M", "t"),
    "ack": lambda t: t.ack("L", "t"),
    "ack elsewhere": lambda t: t.ack("M", "t"),
    "link down": lambda t: t.link_down("L"),
    "other link down": lambda t: t.link_down("M"),
    "lease over": lambda t: [a for a in t.tick(40.0) if not isinstance(a, SendAlive)],
}
CHUNK = PushChunk("L", "t", 0, 0, BLOCKS, [20, 21, 22])
DONE = SendDone("L", "t", 0)
SHORT = fail("10 tokens were granted and 0 computed")
TWICE = fail("the transfer id was used twice")
BEFORE = fail("the transfer was granted before")
ABORTED = fail("the prefill was aborted")
CANCELLED = fail("cancelled")
NOT_YOURS = fail("cancelled", "M")
EXPIRED = fail("the lease ran out")
