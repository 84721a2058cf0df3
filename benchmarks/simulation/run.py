"""A simulation from settings to summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.errors import BenchError
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.retries import Retries
from benchmarks.simulation.service import RouterSettings, Service, Workers
from benchmarks.simulation.summary import Summary, summarise
from benchmarks.simulation.users import UserRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.simulation.arrivals import Arrivals
    from benchmarks.simulation.flight import Outcome
    from benchmarks.simulation.router_meter import RouterMeter
    from benchmarks.simulation.service_model import ServiceModel
    from benchmarks.simulation.users import Users

TELL_S = 0.5


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. Who is refused comes again, up to `retries` times. The `meter` is told
    what the router's code costs."""

    model: ServiceModel
    workers: Workers
    settings: RouterSettings = field(default_factory=RouterSettings)
    retries: int = 0
    meter: RouterMeter | None = None

    def __post_init__(self) -> None:
        workers = self.workers
        if bool(workers.prefill) != bool(workers.decode):
            raise BenchError("prefill and decode workers serve together: give both, or neither")
        if not (workers.decode or workers.aggregated):
            raise BenchError("give prefill and decode workers, or aggregated ones")


@dataclass(frozen=True, slots=True)
class Finished:
    """`outcomes` in the order of arrival; `leftovers` is empty, or the simulation is wrong."""

    summary: Summary
    outcomes: tuple[Outcome, ...]
    leftovers: tuple[str, ...]


def simulate(
    setup: Setup,
    arrivals: Arrivals,
    *,
    tell: Callable[[int, int], None] = lambda ended, asked: None,
) -> Finished:
    """Serve all that arrives, to the last token. The same arguments give the same result.

    `tell` hears now and then of how many requests have ended, of how many.
    """
    clock = VirtualClock()
    block_tokens = arrivals.block_tokens
    horizon_s = arrivals.requests[-1].at_s
    service = Service(
        setup.model,
        setup.workers,
        setup.settings,
        clock,
        block_tokens=block_tokens,
        horizon_s=horizon_s,
        meter=setup.meter,
    )
    retries = Retries(service, setup.retries)
    run = _Run(service.clock, retries, arrivals)
    run.start()
    told_at = time.monotonic()
    while run.ended < len(arrivals.requests):
        if not clock.step():
            raise BenchError("the simulation stands still; this is a bug of it")
        if run.ended % 64 == 0 and time.monotonic() - told_at > TELL_S:
            told_at = time.monotonic()
            tell(run.ended, len(arrivals.requests))
    # What was cancelled leaves its engine with the end of a step.
    while not all(x.is_empty for x in service.engines.values()) and clock.step():
        pass
    leftovers = tuple(service.leftovers())
    outcomes = tuple(x for x in run.outcomes if x is not None)
    summary = summarise(setup, service, outcomes, horizon_s, retries=retries)
    return Finished(summary, outcomes, leftovers)


def simulate_users(
    setup: Setup, users: Users, *, tell: Callable[[int, int], None] = lambda ended, asked: None
) -> Finished:
    """Serve users who wait for their answers. Summed up are the requests that came after the last
    of the users had come."""
    clock = VirtualClock()
    service = Service(setup.model, setup.workers, setup.settings, clock, horizon_s=users.end_s)
    run = UserRun(service, users)
    run.start()
    told_at = time.monotonic()
    while not run.is_over:
        if not clock.step():
            raise BenchError("the simulation stands still; this is a bug of it")
        if time.monotonic() - told_at > TELL_S:
            told_at = time.monotonic()
            tell(len(run.outcomes), round(len(run.outcomes) * users.end_s / clock.now_s))
    leftovers = tuple(service.leftovers())
    outcomes = tuple(x for x in run.outcomes if users.ramp_s <= x.arrived_s < users.end_s)
    summary = summarise(setup, service, outcomes, users.end_s, since_s=users.ramp_s)
    return Finished(summary, outcomes, leftovers)


class _Run:
    """State: the outcomes so far, by place; arrivals are asked one after another."""

    def __init__(self, clock: VirtualClock, retries: Retries, arrivals: Arrivals) -> None:
        self._clock = clock
        self._retries = retries
        self._left: Iterator[int] = iter(range(len(arrivals.requests)))
        self._requests = arrivals.requests
        self.outcomes: list[Outcome | None] = [None] * len(arrivals.requests)
        self.ended = 0

    def start(self) -> None:
        """Have the next request come when it is due, and so on."""
        index = next(self._left, None)
        if index is not None:
            self._clock.at(self._requests[index].at_s, lambda: self._ask(index))

    def _ask(self, index: int) -> None:
        def on_end(outcome: Outcome) -> None:
            assert self.outcomes[index] is None, f"{outcome.request_id} ended twice"
            self.outcomes[index] = outcome
            self.ended += 1

        self._retries.ask(index, self._requests[index], on_end)
        self.start()
