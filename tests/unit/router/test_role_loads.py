"""What work takes of a model's workers, and which worker is the one to move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.step_moments import StepMoments, StepRecorder, StepShape
from pdserve.types import Role, WorkerLoad
from router.cost.outcome import Outcome
from router.cost.pace import MIN_OUTCOMES, Pace, pace_of
from router.cost.step_model import StepModel, fit_steps
from router.fleet.member import Member
from router.roles.controller import Loads
from router.roles.phase_load import loads_of
from router.roles.rules import spare_for
from tests.fakes import worker_info

PACE = Pace(prompt_tokens=100.0, prefill_s=2.0, decode_s=5.0, first_s=2.5)
BLOCKS = 1000


def member(worker_id: str, role: Role, *, seats: int = 10) -> Member:
    info = replace(worker_info(worker_id, role), max_num_seqs=seats, total_blocks=BLOCKS)
    return Member(info, 1e9, attached=True)


def decoding(running: int, *, waiting: int = 0, free: int = BLOCKS) -> WorkerLoad:
    return WorkerLoad(waiting, running, 1.0 - free / BLOCKS, free)


def loads(
    *members: Member, queued: int = 0, pace: Pace | None = PACE, model: StepModel | None = None
) -> Loads:
    return loads_of(members, queued=queued, pace=pace, step_model=lambda _: model, tpot_s=0.1)


@pytest.fixture
def prefill() -> Member:
    return member("p0", Role.PREFILL)


@pytest.fixture
def decode() -> Member:
    return member("d0", Role.DECODE)


def test_workers_that_are_not_ready_or_do_both_phases_count_neither_way(
    prefill: Member, decode: Member
) -> None:
    gone, away = member("p1", Role.PREFILL), member("d1", Role.DECODE)
    gone.draining, away.attached = True, False
    gone.outstanding_tokens = 100
    assert loads(prefill, decode, gone, away, member("a", Role.AGGREGATED)) == Loads(1, 1, 0, 0)


def test_prefill_is_busy_with_prompts_of_whichever_router(prefill: Member) -> None:
    other = member("p1", Role.PREFILL)
    other.load = decoding(1)
    assert loads(prefill, other).prefill_need == 1.0
    prefill.outstanding_tokens = 80
    assert loads(prefill, other).prefill_need == 2.0
    # Three prompts of two seconds wait behind the one at work.
    prefill.outstanding_tokens = 400
    assert loads(prefill, other).prefill_need == pytest.approx(2.0 + 3 * 2.0 / 10.0)
    assert loads(prefill, other, pace=None).prefill_need == 2.0


def test_decode_is_as_loaded_as_what_is_scarcest(decode: Member) -> None:
    decode.load = decoding(4)
    assert loads(decode).decode_need == pytest.approx(0.4)
    decode.reserved_blocks, decode.foreign_blocks = 500, 100
    assert loads(decode).decode_need == pytest.approx(0.6)
    # As many wait for their prefill: their blocks are not decode's load.
    decode.load = decoding(4, waiting=4)
    assert loads(decode).decode_need == pytest.approx(0.4)
    decode.load = decoding(0, waiting=8)
    assert loads(decode).decode_need == 0.0
    decode.load, decode.outstanding_requests = None, 3
    assert loads(decode).decode_need == pytest.approx(0.6)


def test_decode_is_loaded_by_the_time_that_a_token_takes(decode: Member) -> None:
    recorder = StepRecorder()
    for reqs in range(1, 20):
        # 20 ms, and 20 more for each: four requests leave nothing of 100 ms.
        recorder.observe(StepShape(decode_reqs=reqs), 0.02 + 0.02 * reqs, 0.0)
    model = fit_steps(recorder.moments(0.0))
    decode.load = decoding(3)
    assert loads(decode, model=model).decode_need == pytest.approx(0.75, rel=0.05)
    decode.load = decoding(6)
    assert loads(decode, model=model).decode_need == pytest.approx(1.5, rel=0.05)
    assert loads(decode, model=fit_steps(StepMoments())).decode_need == pytest.approx(0.6)


def test_what_waits_in_the_router_counts_for_both_phases(prefill: Member, decode: Member) -> None:
    decode.load = decoding(5)
    found = loads(prefill, decode, queued=20)
    assert found.prefill_need == pytest.approx(20 * 2.0 / 10.0)
    assert found.decode_need == pytest.approx(0.5 + 20 * 0.1 * 5.0 / 10.0)
    decode.load = decoding(0)
    assert loads(prefill, decode, queued=20).decode_need == pytest.approx(20 * 0.1 * 5.0 / 10.0)
    assert loads(prefill, decode, queued=20, pace=None) == Loads(1, 1, 0.0, 0.0)


def test_the_pace_is_that_of_recent_requests() -> None:
    one = Outcome("demo", 0.0, 120, 20, 11, 2.5, 0.5, 2.0, 0.01, "p0", "d0")
    assert pace_of([one] * (MIN_OUTCOMES - 1)) is None
    assert pace_of([one] * MIN_OUTCOMES) == PACE
    single = replace(one, output_tokens=1, tpot_s=None)
    assert pace_of([single] * MIN_OUTCOMES) == replace(PACE, decode_s=0.0)


def test_the_worker_with_the_least_work_is_moved(prefill: Member) -> None:
    busy, calm, held = (member(f"d{i}", Role.DECODE) for i in range(3))
    busy.load, calm.load, held.load = decoding(5), decoding(1), decoding(0)
    held.draining = True
    members = [prefill, busy, calm, held]
    assert spare_for(members, Role.PREFILL, ()) is calm
    assert spare_for(members, Role.PREFILL, ("d1",)) is busy
    assert spare_for(members, Role.PREFILL, ("d0", "d1")) is calm
    # The only one of its role stays.
    assert spare_for(members, Role.DECODE, ()) is None
