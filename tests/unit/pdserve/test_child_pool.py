"""Calls to child processes that reply, die, hang, or break the protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.process import child_pool
from pdserve.process.child_pool import Child, ChildFailed, ChildSlot, End, execute
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ECHO = """
import argparse, os, signal, sys
from pdserve.process.child_pool import calls, connected, limit, reply
_, sock = connected(argparse.ArgumentParser())
for data in calls(sock):
    if data == b"exit":
        sys.exit(3)
    if data == b"cpu":
        limit(1 << 30, cpu_s=1)
        while True:
            pass
    if data == b"long":
        reply(sock, bytes(1001))
    else:
        reply(sock, b"%d %s" % (os.getpid(), data))
"""
START = partial(execute, (sys.executable, "-c", ECHO))


def slot(idle_s: float) -> ChildSlot:
    return ChildSlot(START, timeout_s=WAIT_S, idle_s=idle_s)


@pytest.fixture
async def kept() -> AsyncIterator[ChildSlot]:
    made = slot(idle_s=WAIT_S)
    yield made
    await made.close()


async def pid_of(slot: ChildSlot) -> int:
    pid, data = (await slot.call(b"x")).split()
    assert data == b"x"
    return int(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_is_kept_between_calls_or_ends_with_each(kept: ChildSlot) -> None:
    assert await asyncio.gather(pid_of(kept), pid_of(kept)) == [await pid_of(kept)] * 2
    disposable = slot(idle_s=0.0)
    first, second = await pid_of(disposable), await pid_of(disposable)
    assert first != second
    assert not is_alive(first)
    assert not is_alive(second)


@pytest.mark.parametrize(
    ("data", "end", "code"),
    [
        (b"exit", End.DIED, 3),
        (b"cpu", End.DIED, -signal.SIGXCPU),
        (b"long", End.BROKE, -signal.SIGKILL),
    ],
)
async def test_a_call_that_ends_its_process_says_how_and_the_next_one_starts_another(
    kept: ChildSlot, data: bytes, end: End, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_pool, "_MAX_REPLY_BYTES", 1000)
    pid = await pid_of(kept)
    with pytest.raises(ChildFailed) as failed:
        await kept.call(data)
    assert (failed.value.end, failed.value.code) == (end, code)
    assert await pid_of(kept) != pid
    assert not is_alive(pid)


async def test_an_idle_process_that_dies_costs_no_call(kept: ChildSlot) -> None:
    os.kill(await pid_of(kept), signal.SIGKILL)
    child = kept._child
    assert child is not None
    await asyncio.wait((child.ended,), timeout=WAIT_S)
    assert not kept.is_running
    await pid_of(kept)
    assert kept.starts == 2


async def test_only_a_call_that_waits_for_its_limit_has_hung() -> None:
    replies: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    child = Child(lambda tag, data: replies.put_nowait((tag, data)), start_s=WAIT_S)
    await child.start(START)
    try:
        child.call("a", b"x", WAIT_S)
        assert (await replies.get())[0] == "a"
        child._heard_at -= WAIT_S  # idle since then
        assert child.process is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        child.call("b", b"x", WAIT_S)
        child._check()
        assert not child.ended.done()
        child._heard_at -= WAIT_S
        child._check()
        assert child.ended.result() is End.HUNG
        assert [tag for tag, _ in child.due] == ["b"]
    finally:
        assert await child.close() == -signal.SIGKILL
