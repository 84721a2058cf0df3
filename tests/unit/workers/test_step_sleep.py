"""The step thread sleeps until there is something to do."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.timeouts import WAIT_S
from workers.vllm.sleep import StepSleep

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sleep() -> Iterator[StepSleep]:
    made = StepSleep()
    yield made
    made.close()
    made.wake()  # after the end it does nothing


def wakes_up(sleep: StepSleep) -> bool:
    thread = threading.Thread(target=sleep.wait, args=(None,), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_a_wake_up_before_the_sleep_ends_it_once(sleep: StepSleep) -> None:
    sleep.wake()
    assert wakes_up(sleep)
    assert not sleep._poll.poll(0)


def test_a_byte_from_a_rank_wakes_it_and_is_read(sleep: StepSleep) -> None:
    own, rank = socket.socketpair()
    with own, rank:
        sleep.watch(own.fileno())
        rank.send(b"\1")
        assert wakes_up(sleep)
        assert not sleep._poll.poll(0)


def test_a_rank_that_ended_does_not_keep_it_awake(sleep: StepSleep) -> None:
    own, rank = socket.socketpair()
    with own:
        sleep.watch(own.fileno())
        rank.close()
        assert wakes_up(sleep)
        assert not sleep._poll.poll(0)
