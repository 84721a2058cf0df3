"""Sessions: what the router remembers of a conversation."""

from __future__ import annotations

from pdserve.types import GenerateRequest, SamplingParams, Usage
from router.steps.session import Sessions

WORKERS = frozenset({"p", "d"})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def turn(session: str = "s", tenant: str = "", model: str = "demo") -> GenerateRequest:
    return GenerateRequest(
        "r", model, (1,), SamplingParams(max_tokens=1), tenant=tenant, session=session
    )


def test_a_session_counts_what_its_turns_compute_again() -> None:
    sessions = Sessions(Clock(), idle_s=10.0)
    assert sessions.find(turn()) is None
    assert sessions.answered(turn(), Usage(100, 20, 0), WORKERS) == 0
    # 96 of the 120 tokens of the first turn were cached.
    assert sessions.answered(turn(), Usage(150, 20, 96), WORKERS) == 24
    # The client has shortened its history.
    assert sessions.answered(turn(), Usage(50, 20, 48), frozenset({"p2"})) == 2
    found = sessions.find(turn())
    assert found is not None
    assert (found.turns, found.prompt_tokens, found.cached_tokens) == (3, 300, 144)
    assert (found.recomputed_tokens, found.workers) == (26, {"p2"})


def test_the_last_sessions_are_those_of_all_tenants_by_their_last_answer() -> None:
    clock = Clock()
    sessions = Sessions(clock, idle_s=10.0)
    for tenant, session in (("a", "one"), ("b", "two"), ("a", "three"), ("a", "one")):
        clock.now += 1.0
        sessions.answered(turn(session, tenant), Usage(100, 20, 0), WORKERS)
    last = [(x.tenant, x.session, y.turns) for x, y in sessions.last(2)]
    assert last == [("a", "one", 2), ("a", "three", 1)]
    assert len(sessions.last(10)) == 3


def test_sessions_of_tenants_and_models_are_apart() -> None:
    sessions = Sessions(Clock(), idle_s=10.0, most=2)
    mine = turn(tenant="acme")
    sessions.answered(mine, Usage(1, 1, 0), WORKERS)
    for name in ("a", "b", "c"):
        sessions.answered(turn(name, tenant="other"), Usage(1, 1, 0), WORKERS)
    assert sessions.workers_of(mine) == WORKERS
    assert not sessions.workers_of(turn(tenant="other"))
    assert not sessions.workers_of(turn(tenant="acme", model="large"))
    assert len(sessions) == 3, "the least recently used one of the other tenant is forgotten"
    assert not sessions.workers_of(turn("a", tenant="other"))


def test_an_idle_session_is_forgotten() -> None:
    clock = Clock()
    sessions = Sessions(clock, idle_s=10.0)
    sessions.answered(turn("a"), Usage(1, 1, 0), WORKERS)
    clock.now = 6.0
    sessions.answered(turn("b"), Usage(1, 1, 0), WORKERS)
    clock.now = 11.0
    assert sessions.find(turn("a")) is None
    assert sessions.find(turn("b")) is not None
    clock.now = 20.0
    assert len(sessions) == 0


def test_without_a_lifetime_nothing_is_kept() -> None:
    sessions = Sessions(Clock(), idle_s=0.0)
    sessions.answered(turn(), Usage(1, 1, 0), WORKERS)
    sessions.answered(turn(""), Usage(1, 1, 0), WORKERS)
    assert len(sessions) == 0


def test_the_next_turn_is_expected_within_the_time_that_few_pauses_exceed() -> None:
    clock = Clock()
    sessions = Sessions(clock, idle_s=1000.0)

    def take_turn(pause_s: float, session: str, tenant: str = "") -> float:
        clock.now += pause_s
        expected_s = sessions.arrived(turn(session, tenant))
        # A second request of the session, of an agent's agent, is no pause.
        assert sessions.arrived(turn(session, tenant)) == expected_s
        clock.now += 100.0
        sessions.answered(turn(session, tenant), Usage(100, 20, 0), WORKERS)
        return expected_s

    assert take_turn(0.0, "a") == 0.0, "nothing is known"
    assert take_turn(8.0, "a") == 8.0 + 4 * 4.0
    assert take_turn(8.0, "a") == 8.0 + 4 * 3.0, "they are regular"
    # Of a new session the tenant's others tell, not those of another tenant.
    assert take_turn(0.0, "b", tenant="other") == 0.0
    assert take_turn(0.0, "b") == 8.0 + 4 * 3.0
    assert take_turn(40.0, "b") == 40.0 + 4 * 20.0, "it is known to be slower"
    assert 8.0 + 4 * 3.0 < take_turn(0.0, "c") < 40.0 + 4 * 20.0
