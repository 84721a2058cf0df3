"""Shares of steps add up to their duration, joules to the counter, and accounts to the worker's
time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pdserve.types import IDLE
from workers.metering.energy import Unmeasured, rapl_counter
from workers.metering.worker_account import BusyTime, EnergyMeter, StepWork, WorkerAccount

if TYPE_CHECKING:
    from pathlib import Path

# What a step costs: alone, for a prompt token and for a decoding request.
STEP_S, PROMPT_S, REQUEST_S = 0.01, 0.0001, 0.001


def work(prompts: dict[int, int], decoding: dict[int, int] | None = None) -> StepWork:
    return StepWork([(i, n, 0) for i, n in prompts.items()], [*(decoding or {}).items()])


def busy_with(*stream_ids: int) -> BusyTime:
    busy = BusyTime()
    for stream_id in stream_ids:
        busy.open(stream_id)
    return busy


def run(busy: BusyTime, what: StepWork, seconds: float, now: float) -> None:
    busy.begin(now - seconds)
    busy.step(what, seconds, now)


def test_every_token_counts_the_same_until_enough_steps_were_measured() -> None:
    busy = busy_with(1, 2)
    run(busy, work({1: 30}, {2: 500}), 3.1, now=4.0)
    assert busy.close(2).decode_s == pytest.approx(0.1)
    assert busy.close(1).prefill_s == pytest.approx(3.0)


def test_a_step_is_shared_by_what_each_request_adds_to_it() -> None:
    busy, now, draw = busy_with(1, 2, 3), 0.0, random.Random(1)
    for _ in range(200):
        tokens, requests = draw.choice([0, 0, 50, 200, 1000]), draw.randint(1, 32)
        seconds = STEP_S + PROMPT_S * tokens + REQUEST_S * requests
        now += seconds
        prompts = {10: tokens} if tokens else {}
        run(busy, work(prompts, dict.fromkeys(range(100, 100 + requests), 20)), seconds, now)
    now += 60.0  # the fit is made again
    busy.take_overrun()
    seconds = STEP_S + PROMPT_S * 100 + 2 * REQUEST_S
    run(busy, work({1: 100}, {2: 20, 3: 20}), seconds, now)
    prompt, second, third = (busy.close(i) for i in (1, 2, 3))
    assert prompt.prefill_s == pytest.approx(STEP_S / 3 + PROMPT_S * 100, rel=0.05)
    assert second.decode_s == third.decode_s
    assert prompt.total_s + second.total_s + third.total_s == pytest.approx(seconds)


def test_work_for_a_request_that_has_ended_is_an_overrun() -> None:
    busy = busy_with(1, 2)
    busy.name(1, "one")
    busy.close(1)
    busy.name(1, "one")  # the engine hears of the end later
    run(busy, StepWork([], [("one", 5), (2, 5)]), 2.0, now=3.0)
    assert (busy.take_overrun(), busy.take_overrun(), busy.close(2).total_s) == (1.0, 0.0, 1.0)


def test_an_account_adds_up_to_the_time_that_the_worker_was_there() -> None:
    busy, told = busy_with(1, 2, 3), dict[str, float]()
    account = WorkerAccount(busy, 10.0)
    run(busy, work({1: 8, 2: 8, 3: 8}), 3.0, now=14.0)
    account.waste(1, "cancelled")
    busy.begin(15.0)  # a step under way is no idle time
    claimed = account.claim(17.0, routers=2)
    assert claimed.open_s == pytest.approx(1.0), "two requests are open, at two routers"
    account.give_back(claimed)  # that router is away
    for at in (17.5, 18.0):
        for kind, seconds in account.claim(at, routers=2).seconds.items():
            told[kind] = told.get(kind, 0.0) + seconds
    assert told == {IDLE: pytest.approx(2.0), "cancelled": pytest.approx(1.0)}
    reported = [account.settle(i)[0].total_s for i in (2, 3)]
    under_way_s = busy.busy_until(18.0) - busy.busy_s
    assert sum(told.values()) + sum(reported) + under_way_s == pytest.approx(18.0 - 10.0)


def test_joules_of_requests_and_of_idle_time_add_up_to_the_counter() -> None:
    """100 W without work, 400 W with it; work in the second half of each second."""
    meter, joules, busy_s, taken, draw = EnergyMeter(), 0.0, 0.0, 0.0, random.Random(2)
    meter.read(joules, 0.0, busy_s)
    meter.read(joules := joules + 100.0, 1.0, busy_s)
    for second in range(1, 101):
        joules, busy_s = joules + 50.0 + 200.0, busy_s + 0.5
        if draw.random() < 0.5:  # a request that ends before the counter is read
            taken += meter.take(0.5, busy_s)
            meter.read(joules, second + 1.0, busy_s)
        else:
            meter.read(joules, second + 1.0, busy_s)
            taken += meter.take(0.5, busy_s)
    idle = meter.take_idle()
    assert idle == pytest.approx(100.0 + 100 * 50.0)
    assert taken == pytest.approx(100 * 200.0, rel=0.011), "but for a first one before any reading"


def test_joules_follow_the_seconds_of_requests() -> None:
    busy = busy_with(1, 2)
    account = WorkerAccount(busy, 0.0)
    account.meter = EnergyMeter()
    account.meter.read(0.0, 0.0, 0.0)
    run(busy, work({1: 30, 2: 10}), 4.0, now=4.0)
    account.meter.read(1200.0, 4.0, busy.busy_until(4.0))
    assert account.settle(1)[1] == pytest.approx(900.0)
    account.waste(2, "cancelled")
    assert account.claim(4.0, 1).energy_j["cancelled"] == pytest.approx(300.0)


def test_without_a_meter_no_joules_are_reported() -> None:
    account = WorkerAccount(busy_with(1), 0.0)
    assert account.settle(1)[1] is None
    assert account.claim(4.0, 1).energy_j == {}


def powercap(folder: Path, **microjoules: int) -> None:
    for name, value in microjoules.items():
        package = folder / f"intel-rapl:{name[1:].replace('_', ':')}"
        package.mkdir(exist_ok=True)
        (package / "energy_uj").write_text(f"{value}\n")
        (package / "max_energy_range_uj").write_text("9999999\n")


def test_rapl_counts_packages_also_when_a_counter_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    powercap(tmp_path, _0=9_000_000, _1=0, _0_0=0)
    with rapl_counter(tmp_path) as read:
        powercap(tmp_path, _0=1_000_000, _1=500_000, _0_0=7_000_000)
        assert read() == pytest.approx(2.0 + 0.5)


def test_rapl_is_refused_where_it_counts_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(Unmeasured, match="no RAPL counter"), rapl_counter(tmp_path):
        pass
    monkeypatch.setattr("os.cpu_count", lambda: 10**6)
    with pytest.raises(Unmeasured, match="only some of the CPU's cores"), rapl_counter(tmp_path):
        pass
