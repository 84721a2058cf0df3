"""What was promised of a request, and by when it must be granted for it; promises to come again."""

from __future__ import annotations

import math
from random import Random

import pytest

from pdserve.errors import Overloaded, Refusal, Unavailable
from pdserve.types import ServiceClass
from router.admission.drain import DEVIATIONS, LEAST_SAMPLES, WINDOW, MeasuredDrain
from router.admission.limits import AdmissionLimits, Bid, bid_of
from router.admission.promises import GRACE_S, MAX_PROMISES, MAX_RETRY_AFTER_S, SHARE, Promises
from router.admission.term import STRETCH, refusal, term_of
from tests.unit.router.asking import request

LIMITS = AdmissionLimits(ttft_s=1.0)
SLO, DEADLINE = Refusal.SLO_UNREACHABLE, Refusal.DEADLINE_UNREACHABLE


def measured(base_s: float = 0.1, token_s: float = 0.001, gap_s: float = 0.01) -> MeasuredDrain:
    """Answers of 11 tokens; prompts of all lengths up to 2000."""
    drain = MeasuredDrain()
    for tokens in range(250, 2001, 250):
        drain.prefilled("demo", tokens, base_s + tokens * token_s)
        drain.answered("demo", 11, 10 * gap_s)
    return drain


@pytest.mark.parametrize(
    ("bid", "latest_s", "reason"),
    [
        ({"prompt_tokens": 100}, math.inf, DEADLINE),
        ({"prompt_tokens": 100, "has_slo": True}, 1.0 - 0.2, SLO),
        # One that takes longer than the limit by itself may wait for as long as it takes.
        ({"prompt_tokens": 2000, "has_slo": True}, 2.0, SLO),
        # The whole answer is wanted by a deadline: as long as answers are, or may be.
        ({"prompt_tokens": 100, "max_tokens": 500, "deadline": 3.0}, 3.0 - 0.2 - 0.1, DEADLINE),
        ({"prompt_tokens": 100, "max_tokens": 6, "deadline": 3.0}, 3.0 - 0.2 - 0.05, DEADLINE),
        ({"prompt_tokens": 100, "deadline": 3.0, "has_slo": True}, 0.8, SLO),
        ({"prompt_tokens": 100, "deadline": 0.5, "has_slo": True}, 0.3, DEADLINE),
    ],
)
def test_by_when_a_request_must_be_granted(
    bid: dict[str, float], latest_s: float, reason: Refusal
) -> None:
    values = {"max_tokens": 1, **bid}
    term = term_of(Bid("demo", **values), 0.0, LIMITS, measured())  # type: ignore[arg-type]
    assert term.latest_start == pytest.approx(latest_s, abs=0.01)
    assert term.reason is reason
    prefill_s = 0.1 + 0.001 * bid["prompt_tokens"]
    assert term.due == pytest.approx(min(STRETCH * prefill_s, latest_s), abs=0.01)


def test_without_measured_prefills_nobody_is_late_for_the_slo() -> None:
    drain = MeasuredDrain()
    for _ in range(LEAST_SAMPLES - 1):
        drain.prefilled("demo", 100, 5.0)
    bid = Bid("demo", prompt_tokens=100, has_slo=True)
    assert term_of(bid, 0.0, LIMITS, drain).latest_start == math.inf
    drain.prefilled("demo", 100, 5.0)
    assert term_of(bid, 0.0, LIMITS, drain).latest_start < math.inf
    assert term_of(bid, 0.0, AdmissionLimits(), drain).latest_start == math.inf


def test_who_has_an_slo() -> None:
    assert bid_of(request(), kv_tokens=1, deadline=None).has_slo
    batch = request(service_class=ServiceClass.BATCH)
    assert not bid_of(batch, kv_tokens=1, deadline=None).has_slo, "nobody waits for it"
    resumed = bid_of(request(resume=(1, 2)), kv_tokens=1, deadline=None)
    assert not resumed.has_slo, "its first token came long ago"


def test_what_a_refusal_says() -> None:
    slo = refusal(term_of(Bid("demo", has_slo=True), 0.0, LIMITS, measured()), 0.25, 3.0)
    assert isinstance(slo, Overloaded)
    assert "0.25 s later than is promised; try again in 3 s" in slo.message
    deadline = refusal(term_of(Bid("demo", deadline=1.0), 0.0, LIMITS, measured()), 0.25, 3.0)
    assert isinstance(deadline, Unavailable)
    assert "0.25 s after its deadline" in deadline.message
    assert (slo.reason, deadline.reason) == (SLO, DEADLINE)
    assert slo.retry_after_s == deadline.retry_after_s == 3.0


def test_predictions_forget_what_is_old_and_keep_some_distance_from_the_mean() -> None:
    drain, random = measured(base_s=7.0, gap_s=3.0), Random(1)
    for _ in range(WINDOW):
        tokens = random.randint(1, 1000)
        noise_s = random.choice((-0.1, 0.1))
        drain.prefilled("demo", tokens, 0.2 + 0.002 * tokens + noise_s)
        drain.answered("demo", 101, 1.0)
    predicted = drain.prefill_s("demo", 500)
    assert predicted == pytest.approx(0.2 + 1.0 + DEVIATIONS * 0.1, abs=0.05)
    assert drain.prompt_s("demo", 500) == pytest.approx(1.0, abs=0.1)
    assert drain.answer_s("demo", 1000) == pytest.approx(1.0)
    assert drain.answer_s("other", 1000) is None


def told(promises: Promises, count: int, *, turn_s: float = 0.1, now: float = 50.0) -> list[float]:
    return [promises.make(identity, turn_s, now) for identity in range(count)]


def test_as_many_are_told_a_second_as_are_served_in_it() -> None:
    seconds = told(Promises(), 70)
    assert seconds == sorted(seconds)
    assert max(seconds.count(x) for x in set(seconds)) <= round(SHARE / 0.1)
    assert seconds[-1] == pytest.approx(70 * 0.1 / SHARE, abs=1.0)
    slow = told(Promises(), 3, turn_s=7.0)
    assert slow == [10.0, 20.0, 30.0]


def test_a_place_is_kept_for_who_comes_when_told_and_lapses_soon_after() -> None:
    promises = Promises()
    waits = told(promises, 20)
    assert promises.make(0, 0.1, 50.2) == waits[0], "who asks again is told the same"
    assert not promises.claim(19, 50.2), "it is not its turn"
    assert promises.claim(0, 50.0 + waits[0])
    assert not promises.claim(0, 50.0 + waits[0]), "used up"
    assert promises.kept(50.5) > 0.0
    late = 50.0 + max(waits) + GRACE_S + 1.0
    assert promises.kept(late) == 0.0
    assert len(promises) == 0
    assert not promises.claim(5, late)


def test_where_nobody_comes_again_others_are_told_early_times() -> None:
    promises, now = Promises(), 50.0
    first = max(told(promises, 400))
    for step in range(60):
        now = 50.0 + step / 2
        promises.kept(now)
    assert promises.kept(now) < 3.0, "next to nothing is kept for those who do not come"
    assert promises.make(1000, 0.1, now) < first / 4


def test_memory_is_bounded() -> None:
    promises = Promises()
    seconds = told(promises, MAX_PROMISES + 10, turn_s=0.001)
    assert len(promises) == MAX_PROMISES
    assert seconds[-1] == MAX_RETRY_AFTER_S
    assert told(Promises(), 1, turn_s=1000.0) == [MAX_RETRY_AFTER_S]
    promises.kept(1000.0)
    assert len(promises) == len(promises._by_second) == 0
