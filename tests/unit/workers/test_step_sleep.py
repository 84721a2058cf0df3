"""The step thread sleeps until there is something to do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pdserve.process.wakeup import Wakeup
from tests.support.timeouts import WAIT_S
from workers.vllm.step.sleep import StepSleep

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


def test_a_watched_event_wakes_it_once(sleep: StepSleep) -> None:
    event = Wakeup()
    sleep.watch(event.fileno())
    event.set()
    assert wakes_up(sleep)
    assert not sleep._poll.poll(0)
    event.close()
