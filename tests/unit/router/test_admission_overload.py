"""Twice as much is asked for as can be served, on a virtual clock: predictions come true."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Overloaded, PdserveError, Refusal, Unavailable
from router.admission.gate import Gate, Grant, Place
from router.admission.limits import AdmissionLimits, Bid
from router.admission.tenants import Tenant, Tenants

if TYPE_CHECKING:
    from collections.abc import Callable


class Nothing:
    """Seats are all that there is to reserve."""

    def release(self) -> None: ...


@dataclass(eq=False)
class Client:
    """One request of the simulation; it runs for `service_s` when its turn has come."""

    world: World
    bid: Bid
    service_s: float
    refusals: list[PdserveError] = field(default_factory=list)
    tries: int = 0
    is_gone: bool = False

    def ask(self) -> None:
        self.tries += 1
        try:
            outcome = self.world.gate.offer(self.bid, Nothing, self)
        except PdserveError as error:
            self.refused(error)
            return
        if isinstance(outcome, Place):
            self.world.gate.settle(outcome)
        else:
            self.granted(outcome)

    def granted(self, grant: Grant[Nothing]) -> None:
        self.world.served.append(self)
        self.world.after(self.service_s, grant.release)

    def refused(self, error: PdserveError) -> None:
        self.refusals.append(error)
        self.world.on_refusal(self, error)


class World:
    """Events in order of time; the gate's clock is theirs."""

    def __init__(self, limits: AdmissionLimits, tenants: Tenants | None = None) -> None:
        self.now = 0.0
        self.gate = Gate(limits, clock=lambda: self.now, tenants=tenants)
        self.served: list[Client] = []
        self.on_refusal: Callable[[Client, PdserveError], None] = lambda *_: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), event))

    def run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def client(self, service_s: float, **bid: Any) -> Client:
        values = {"prompt_tokens": 100, "work_tokens": 200, "identity": (next(self._count),)}
        return Client(self, Bid("demo", **{**values, **bid}), service_s)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("queued", [8, 64])
def test_who_comes_again_when_told_is_taken_nine_times_in_ten(seed: int, queued: int) -> None:
    random = Random(seed)
    world = World(AdmissionLimits(16, queued))
    retried = 0

    def come_again(client: Client, error: PdserveError) -> None:
        nonlocal retried
        assert isinstance(error, Overloaded)
        assert error.reason == Refusal.QUEUE_FULL
        # Who was sent away too often, or is to wait for minutes, goes elsewhere.
        if client.tries < 4 and error.retry_after_s < 60.0:
            retried += 1
            world.after(error.retry_after_s, client.ask)

    world.on_refusal = come_again
    # 16 seats, 2 s a request: 8 requests a second can be served, and 16 a second come.
    at = 0.0
    clients = []
    while at < 120.0:
        at += random.expovariate(16.0)
        client = world.client(random.lognormvariate(0.5, 0.6))
        clients.append(client)
        world.after(at, client.ask)
    world.run()
    assert retried > 500
    refused_again = sum(max(0, len(client.refusals) - 1) for client in clients)
    assert refused_again <= 0.1 * retried, (refused_again, retried)
    assert (world.gate.running, world.gate.queued) == (0, 0)


def test_without_regard_for_the_time_told_retries_fail() -> None:
    """The check on the check: in this overload, coming again at once does not do."""
    random = Random(1)
    world = World(AdmissionLimits(16, 64))
    world.on_refusal = lambda client, _: world.after(0.2, client.ask) if client.tries < 4 else None
    clients = [world.client(random.lognormvariate(0.5, 0.6)) for _ in range(1000)]
    for i, client in enumerate(clients):
        world.after(i / 16.0, client.ask)
    world.run()
    retried = sum(client.tries - 1 for client in clients)
    refused_again = sum(max(0, len(client.refusals) - 1) for client in clients)
    assert refused_again > 0.5 * retried


@pytest.mark.parametrize("queued", [2, 64])
def test_nothing_is_kept_for_clients_who_do_not_come_again(queued: int) -> None:
    random = Random(2)
    world = World(AdmissionLimits(16, queued))
    clients = [world.client(2.0) for _ in range(1600)]
    for client in clients:
        world.after(random.uniform(0.0, 100.0), client.ask)
    world.run()
    assert len(world.served) >= 0.95 * 8 * 100


def test_goodput_holds_where_deadlines_cannot_be_met() -> None:
    """Those that cannot be in time are sent away before anything is computed for them, so that the
    others are: nearly all that is served is in time, and the seats are as busy as ever."""
    random = Random(5)
    world = World(AdmissionLimits(16, 1000))
    asked: list[Client] = []

    def arrive() -> None:
        client = world.client(random.uniform(1.0, 3.0), deadline=world.now + 5.0)
        asked.append(client)
        client.ask()

    at = 0.0
    while at < 120.0:
        at += random.expovariate(16.0)
        world.after(at, arrive)
    world.run()
    reasons = Counter(error.reason for client in asked for error in client.refusals)
    assert set(reasons) == {Refusal.DEADLINE_UNREACHABLE}
    assert all(type(e) is Unavailable for c in asked for e in c.refusals)
    # 8 a second can be served.
    assert len(world.served) >= 0.95 * 8 * 120
    assert (world.gate.running, world.gate.queued) == (0, 0)
    # Most were told as they came, so that they lost no time in the queue.
    at_once = sum(client.refusals[0].retry_after_s < 5.0 for client in asked if client.refusals)
    assert at_once == sum(reasons.values())


def test_a_greedy_tenant_gets_its_share_and_no_more() -> None:
    random = Random(7)
    tenants = Tenants([Tenant("greedy"), Tenant("a", weight=1.0), Tenant("b", weight=2.0)])
    world = World(AdmissionLimits(8, 4000), tenants)
    # The greedy one asks for ten times what can be served, at once; the others for about all.
    for name, rate in (("greedy", 40.0), ("a", 4.0), ("b", 4.0)):
        at = 0.0
        while at < 90.0:
            at += random.expovariate(rate)
            tokens = random.randint(100, 900)
            client = world.client(tokens / 250.0, tenant=name, work_tokens=tokens)
            world.after(at, client.ask)
    world.run(until=90.0)
    # Of what was served while all of them waited.
    work: Counter[str] = Counter()
    for client in world.served[100:]:
        work[client.bid.tenant] += client.bid.work_tokens
    shares = {name: tokens / sum(work.values()) for name, tokens in work.items()}
    assert shares == pytest.approx({"greedy": 0.25, "a": 0.25, "b": 0.5}, abs=0.03)
    world.on_refusal = lambda *_: None
    world.run()
    assert [tenants.concurrent(name) for name in ("greedy", "a", "b")] == [0, 0, 0]
