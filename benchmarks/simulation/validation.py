"""The simulator against real processes: the same requests through both, and how far it was off.

Each case starts a `pdserve up`, profiles it as a user would (`pdserve profile`), and then replays a
part of a trace in each round. The simulator is given the profile, and the times at which the
replay's requests were sent; it has not seen their answers.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from benchmarks.grpc_target import GrpcTarget
from benchmarks.metrics import tpot_s, ttft_s
from benchmarks.run import ReplaySettings, run_replay
from benchmarks.simulation.arrivals import Arrival, Arrivals
from benchmarks.simulation.run import Setup, simulate
from benchmarks.simulation.service import RouterSettings, Workers
from benchmarks.simulation.service_model import of_profile
from benchmarks.stats import percentile
from benchmarks.workload import Shape
from pdserve.config import RouterConfig, SloConfig
from pdserve.profiling.measure import Grid, Service, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.records import RequestRecord, Status
    from benchmarks.simulation.flight import Outcome
    from benchmarks.targets import ServedModel
    from benchmarks.workload import Workload
    from pdserve.profiling.document import Profile

PERCENTS: Final = (50, 90, 99)
# Of the fake engine: slow enough that what the machine adds to each step is little of it.
FAKE: Final = {"step_s": 0.05, "prefill_s": 0.001, "transfer_s": 0.01, "total_blocks": 8192}
# A machine that is busy with other things must not take a worker for one that hangs.
_PATIENT: Final = {"stall_s": 60.0, "failures": 1000}
# What is compared is how long answers take: nobody is refused for it.
NOBODY: Final = SloConfig(refuse_beyond=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """What is started, and how much is asked of it: `requests` of the chat trace a round, with
    lengths scaled by `scale`."""

    name: str
    engine: str
    workers: Workers
    rate_per_s: float
    requests: int = 120
    scale: Fraction = Fraction(1, 4)
    prompts: tuple[int, ...] = (32, 128, 512, 1024)
    concurrency: tuple[int, ...] = (1, 4, 8)

    @property
    def is_apart(self) -> bool:
        """Whether each worker can have a core. What those that share one take from each other is
        not simulated."""
        return self.workers.prefill + self.workers.decode <= len(os.sched_getaffinity(0))

    def config(self) -> dict[str, Any]:
        """Of its `pdserve up`."""
        worker: dict[str, Any] = {"engine": self.engine}
        if self.engine == "fake":
            worker["engine_args"] = dict(FAKE)
        up = {"prefill": self.workers.prefill, "decode": self.workers.decode}
        if self.engine != "fake":  # which computes nothing
            up["cores_per_worker"] = int(self.is_apart)
        router: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "lease_s": 60.0}
        router |= {"detection": dict(_PATIENT), "slo": {"refuse_beyond": NOBODY.refuse_beyond}}
        return {"router": router, "worker": worker, "up": up}


CASES: Final = (
    Case("fake 1P1D", "fake", Workers(1, 1), 1.6),
    Case("fake 2P2D", "fake", Workers(2, 2), 3.2),
    Case("vLLM 1P1D", "vllm", Workers(1, 1), 1.5, requests=60, scale=Fraction(1, 8)),
    Case("vLLM 2P2D", "vllm", Workers(2, 2), 1.5, requests=60, scale=Fraction(1, 8)),
)


@dataclass(frozen=True, slots=True)
class Round:
    """Percentiles of one round, real and simulated, in seconds, by metric and percent."""

    real: dict[str, dict[int, float]]
    simulated: dict[str, dict[int, float]]
    requests: int
    failed: int


@dataclass(frozen=True, slots=True)
class Validated:
    """One case. `fit_error` is the step models' own, by worker."""

    case: Case
    rounds: tuple[Round, ...]
    fit_error: dict[str, float] = field(default_factory=dict)

    def errors(self, metric: str, percent: int) -> list[float]:
        """Simulated over real, less 1, a round."""
        return [
            x.simulated[metric][percent] / x.real[metric][percent] - 1
            for x in self.rounds
            if x.real[metric][percent] > 0
        ]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "case": self.case.name,
            "rate_per_s": self.case.rate_per_s,
            "requests_a_round": self.case.requests,
            "fit_error": self.fit_error,
            "rounds": [
                {"real": x.real, "simulated": x.simulated, "failed": x.failed} for x in self.rounds
            ],
            "median_error": {
                metric: {percent: median(self.errors(metric, percent)) for percent in PERCENTS}
                for metric in ("ttft", "tpot")
            },
        }


async def validate(
    case: Case, rounds: int, directory: Path, tell: Callable[[str], None]
) -> Validated:
    """Start, profile, replay, simulate. Raises BenchError."""
    async with AsyncExitStack() as ending:
        stack = Stack(case.name.replace(" ", "-"), case.config(), directory / case.name)
        ending.push_async_callback(stack.stop)
        await stack.start()
        assert stack.ready is not None
        address = stack.ready["grpc"]
        grid = Grid(case.prompts, case.concurrency)
        tell(f"{case.name}: profiling")
        profile = await measure(Service(address), grid, lambda *_: None)
        found = []
        for number in range(rounds):
            tell(f"{case.name}: round {number + 1} of {rounds}")
            records = await _replay(case, number, address)
            found.append(_round(case, profile, records))
    errors = {x.worker_id: x.steps.error for x in profile.workers if x.steps is not None}
    return Validated(case, tuple(found), errors)


async def _replay(case: Case, number: int, address: str) -> Sequence[RequestRecord]:
    shape = Shape(scale_lengths=case.scale, skip=number * case.requests, limit=case.requests)
    settings = ReplaySettings(
        trace="chat", shape=shape, rate_per_s=case.rate_per_s, seed=number, warmup=2
    )
    target = GrpcTarget(address)
    try:
        return (await run_replay(settings, target, _Silent())).records
    finally:
        await target.aclose()


def _round(case: Case, profile: Profile, records: Sequence[RequestRecord]) -> Round:
    good = [x for x in records if x.status == "ok" and x.sent_s is not None]
    if not good:
        raise BenchError(f"{case.name}: no request was answered")
    first = min(x.sent_s or 0.0 for x in good)
    asked = sorted(
        (Arrival((x.sent_s or 0.0) - first, x.input_tokens, x.output_tokens) for x in good),
        key=lambda x: x.at_s,
    )
    settings = RouterSettings(RouterConfig(slo=NOBODY))
    setup = Setup(of_profile(profile), case.workers, settings)
    finished = simulate(setup, Arrivals(tuple(asked), 0, ()))
    return Round(_real(good), _simulated(finished.outcomes), len(good), len(records) - len(good))


def _real(records: Sequence[RequestRecord]) -> dict[str, dict[int, float]]:
    return {
        "ttft": _percentiles([x for r in records if (x := ttft_s(r)) is not None]),
        "tpot": _percentiles([x for r in records if (x := tpot_s(r)) is not None]),
    }


def _simulated(outcomes: Sequence[Outcome]) -> dict[str, dict[int, float]]:
    good = [x for x in outcomes if not x.error]
    return {
        "ttft": _percentiles([x.ttft_s for x in good]),
        "tpot": _percentiles([gap for x in good if (gap := x.tpot_s) is not None]),
    }


def _percentiles(values: list[float]) -> dict[int, float]:
    return {percent: percentile(sorted(values), percent) for percent in PERCENTS}


class _Silent:
    """Hears of a replay and says nothing."""

    def prepared(self, workload: Workload, model: ServedModel) -> None: ...

    def sent(self) -> None: ...

    def finished(self, status: Status) -> None: ...
