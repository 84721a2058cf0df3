"""A comparison from settings to result: start the arms, warm them up, take turns, sweep."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - dataclass fields
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Protocol

from benchmarks.compare import plan as planning
from benchmarks.compare.result import CompareResult, Measurement
from benchmarks.compare.session import ArmPlan, Contender, Face, Session
from benchmarks.compare.settings import KV_TOKENS, differences
from benchmarks.compare.sweep import Probe, next_rate
from benchmarks.errors import BenchError
from benchmarks.metrics import summarise
from benchmarks.result import host_facts
from benchmarks.run import ReplaySettings, run_replay
from benchmarks.trace import load_trace
from benchmarks.workload import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.compare.plan import Replay
    from benchmarks.records import Status
    from benchmarks.replay import Clock
    from benchmarks.result import ReplayResult
    from benchmarks.targets import ServedModel
    from benchmarks.trace import Trace
    from benchmarks.workload import Workload

# Without a factor, lengths are halved on a processor until prompts are no longer than this on
# average: a small machine then shows the traffic's shape in seconds.
CPU_MEAN_INPUT: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """Everything that decides what is compared, and how.

    ``scale_lengths`` None is a power of a half where arms started here have no accelerator, else 1.
    ``probes`` 0 makes no sweep; otherwise every arm has that many at the most.
    """

    trace: str
    scale_lengths: Fraction | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    rate_per_s: float = 2.0
    requests: int = 40
    rounds: int = 5
    probes: int = 0
    probe_s: float = 15.0
    seed: int = 0
    drain_timeout_s: float = 60.0
    slo_s: Mapping[str, float] = field(default_factory=dict)
    baseline: str
    face: Face = "grpc"
    restart: bool = False
    meant_to_differ: tuple[str, ...] = ()
    endpoint_model: str | None = None
    vocab_size: int | None = None


class CompareObserver(Protocol):
    """Is told how a comparison goes on. Also a `RunObserver` of each of its replays."""

    def starting(self, name: str) -> None:
        """An arm is being started."""
        ...

    def started(self, name: str, ready_s: float | None) -> None:
        """It serves."""
        ...

    def replaying(self, replay: Replay) -> None:
        """A replay begins."""
        ...

    def replayed(self, replay: Replay, result: ReplayResult) -> None:
        """It ended."""
        ...

    def prepared(self, workload: Workload, model: ServedModel) -> None:
        """All bodies of a replay are built."""
        ...

    def sent(self) -> None:
        """A request went out."""
        ...

    def finished(self, status: Status) -> None:
        """A request ended."""
        ...


async def run_compare(
    settings: CompareSettings,
    arms: Sequence[ArmPlan],
    observer: CompareObserver,
    *,
    directory: Path,
    clock: Clock | None = None,
) -> CompareResult:
    """Compare ``arms``; their processes' files go to ``directory``.

    Raises :class:`BenchError` where an arm does not start, or differs from another in a setting
    that is not ``meant_to_differ``.
    """
    trace = load_trace(settings.trace)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    contenders = [Contender(x, settings.face, settings.endpoint_model, directory) for x in arms]
    async with Session(contenders, restart=settings.restart) as session:
        settings = await _start(settings, session, trace, observer)
        driver = _Driver(settings, session, trace, observer, clock)
        await driver.warm_up()
        measurements = [*await driver.rounds(), *await driver.sweep()]
        facts = tuple(contender.facts for contender in contenders if contender.facts is not None)
    return CompareResult(
        created=created,
        trace=asdict(trace.meta) | {"digest": trace.digest()},
        settings=asdict(settings) | {"scale_lengths": str(settings.scale_lengths)},
        host=host_facts(),
        slo_s=dict(settings.slo_s),
        baseline=settings.baseline,
        meant_to_differ=settings.meant_to_differ,
        arms=facts,
        measurements=tuple(measurements),
    )


async def _start(
    settings: CompareSettings, session: Session, trace: Trace, observer: CompareObserver
) -> CompareSettings:
    """Start every arm and refuse those that are not alike; the settings with what that told."""
    names = iter(session.contenders)
    observer.starting(next(names))
    async for contender in session.start():
        assert contender.facts is not None
        observer.started(contender.name, contender.facts.ready_s)
        if (following := next(names, None)) is not None:
            observer.starting(following)
    facts = [c.facts for c in session.contenders.values() if c.facts is not None]
    found = differences({x.name: x.settings for x in facts}, settings.meant_to_differ)
    if found:
        unlike = [difference.name for difference in found]
        share = " (--kv-cache-mib gives each arm as much)" if unlike == [KV_TOKENS] else ""
        raise BenchError(
            "the arms are not alike, so nothing could be learnt from comparing them: "
            f"{'; '.join(map(str, found))}{share}. If that is what you compare, say "
            f"--differ {','.join(unlike)}"
        )
    served = [c.served for c in session.contenders.values() if c.served is not None]
    devices = {d for x in facts if x.settings for d in x.settings.of_workers.get("device", ())}
    scale = settings.scale_lengths
    if scale is None:
        is_on_cpu = any(x.settings for x in facts) and devices <= {"cpu"}
        scale = fitting_scale(trace) if is_on_cpu else Fraction(1)
    limits = [settings.max_total_tokens, *(model.max_model_len for model in served)]
    return replace(
        settings,
        scale_lengths=scale,
        # One vocabulary and one limit for all, so that every arm is sent the same.
        vocab_size=settings.vocab_size or _least([model.vocab_size for model in served]),
        max_total_tokens=_least(limits),
    )


def _least(values: Sequence[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def fitting_scale(trace: Trace) -> Fraction:
    """The largest power of a half that makes prompts short enough for a processor."""
    mean = sum(row.input_tokens for row in trace.requests) / len(trace.requests)
    scale = Fraction(1)
    while mean * scale > CPU_MEAN_INPUT:
        scale /= 2
    return scale


@dataclass(frozen=True, slots=True)
class _Driver:
    """Measures the arms of a session."""

    settings: CompareSettings
    session: Session
    trace: Trace
    observer: CompareObserver
    clock: Clock | None

    async def warm_up(self) -> None:
        """Send each arm something that no figure is taken from."""
        if self.settings.restart:
            return
        s = self.settings
        for replay in planning.warmups(self._names, s.rate_per_s, s.requests, s.seed):
            await self._measure(replay)

    async def rounds(self) -> list[Measurement]:
        """All rounds, the arms in turn."""
        s = self.settings
        planned = planning.rounds(self._names, s.rate_per_s, s.requests, s.rounds, s.seed)
        return [await self._measure(replay) for replay in planned]

    async def sweep(self) -> list[Measurement]:
        """For each arm the probes that find its highest rate; the arms in turn."""
        s = self.settings
        probes: dict[str, list[Probe]] = {name: [] for name in self._names}
        found = []
        for number in range(s.probes):
            for name in planning.in_turn(self._names, number):
                rate = next_rate(probes[name], first=s.rate_per_s, limit=s.probes)
                if rate is None:
                    continue
                replay = planning.probe(
                    name, number, rate, requests=s.requests, least_s=s.probe_s, seed=s.seed
                )
                measurement = await self._measure(replay)
                slo = summarise(measurement.records, s.slo_s).slo
                assert slo is not None, "the command line refuses a sweep without limits"
                probes[name].append(Probe(rate, slo.attainment))
                found.append(measurement)
        return found

    @property
    def _names(self) -> list[str]:
        return list(self.session.contenders)

    async def _measure(self, replay: Replay) -> Measurement:
        """Measure; once more where this client was late, which says nothing of the arm."""
        found = await self._measure_once(replay)
        if replay.kind == "warmup" or summarise(found.records).degraded is None:
            return found
        again = await self._measure_once(planning.repeat(replay))
        return replace(again, repeated=True)

    async def _measure_once(self, replay: Replay) -> Measurement:
        contender, is_fresh = await self.session.ready(replay.arm)
        self.observer.replaying(replay)
        meter = self.session.meter(replay.arm)
        result = await run_replay(
            self._replay_settings(replay, is_fresh=is_fresh),
            contender.target,
            self.observer,
            self.clock,
            trace=self.trace,
        )
        use = meter.use()
        changed = None if contender.stack is None else await contender.stack.changed()
        self.observer.replayed(replay, result)
        speedup: Any = result.settings["speedup"]
        return Measurement(
            arm=replay.arm,
            kind="probe" if replay.kind == "probe" else "round",
            number=replay.number,
            rate_per_s=replay.rate_per_s,
            speedup=speedup,
            workload=result.workload,
            processor=use,
            notes=() if changed is None else (changed,),
            records=result.records,
        )

    def _drain_s(self, replay: Replay) -> float:
        """How long answers are waited for. Whoever is not done when the slowest answer within the
        limits would be has missed them, and of a probe no more than that is asked."""
        s = self.settings
        if replay.kind != "probe" or not {"ttft", "tpot"} <= set(s.slo_s):
            return s.drain_timeout_s
        assert s.scale_lengths is not None
        longest = max(row.output_tokens for row in self.trace.requests) * s.scale_lengths
        tokens = min(longest, s.max_output_tokens or longest)
        return min(s.drain_timeout_s, s.slo_s["ttft"] + float(tokens) * s.slo_s["tpot"] + 1.0)

    def _replay_settings(self, replay: Replay, *, is_fresh: bool) -> ReplaySettings:
        s = self.settings
        assert s.scale_lengths is not None
        return ReplaySettings(
            trace=s.trace,
            shape=Shape(
                scale_lengths=s.scale_lengths,
                max_output_tokens=s.max_output_tokens,
                max_total_tokens=s.max_total_tokens,
                skip=replay.skip,
                limit=replay.requests,
            ),
            rate_per_s=replay.rate_per_s,
            seed=replay.seed,
            warmup=planning.WARMUP_REQUESTS if is_fresh else 1,
            drain_timeout_s=self._drain_s(replay),
            model=s.endpoint_model if self.session.contenders[replay.arm].stack is None else None,
            vocab_size=s.vocab_size,
        )
