"""Run a comparison: start the variants, warm up, measure rounds in turn, sweep the rate."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.client import GrpcTarget, HttpTarget, ServedModel, Target
from benchmarks.compare.fairness import KV_TOKENS, ProcessorMeter, differences, settings_of
from benchmarks.compare.result import (
    CompareResult,
    Kind,
    Measurement,
    VariantFacts,
    VariantSettings,
)
from benchmarks.compare.summary import next_rate, probes_of
from benchmarks.compare.vllm_stack import VllmStack
from benchmarks.errors import BenchError
from benchmarks.metrics import summarise
from benchmarks.replay import ReplaySettings, host_facts, jsonable, run_replay
from benchmarks.service import LocalService
from benchmarks.stats import WARMUP, alternate
from benchmarks.traces import load_trace
from benchmarks.workload import Shape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.compare.variants import Variant
    from benchmarks.progress import Progress
    from benchmarks.traces import Trace

    Connect = Callable[[str], Target]

# Without --scale-lengths, lengths on a CPU are halved until the mean prompt has at most this many
# tokens.
CPU_MEAN_INPUT: Final = 512
WARMUP_REQUESTS: Final = 8
MAX_PROBE_REQUESTS: Final = 2000
DRAIN_TIMEOUT_S: Final = 60.0
_SEEDS: Final = 10_000  # number of seeds for each kind of replay


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """Settings of a comparison. `scale_lengths`: None chooses it by the device. `probes`: most
    probes of a sweep for each variant; 0 means no sweep."""

    trace: str
    scale_lengths: Fraction | None = None
    max_output_tokens: int | None = None
    max_turns: int | None = None
    max_total_tokens: int | None = None
    rate_per_s: float = 2.0
    requests: int = 40
    rounds: int = 5
    probes: int = 0
    probe_s: float = 15.0
    seed: int = 0
    slo_s: Mapping[str, float] = field(default_factory=dict)
    baseline: str
    api: Literal["grpc", "http"] = "grpc"
    differ: tuple[str, ...] = ()
    endpoint_model: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class _RunningVariant:
    """A running variant: its processes, if they are started here, and the connection to it.
    `model`: name of the model; None selects the only one."""

    facts: VariantFacts
    served: ServedModel
    target: Target
    service: LocalService | VllmStack | None
    model: str | None

    @property
    def ready(self) -> Mapping[str, Any]:
        return {} if self.service is None else self.service.ready


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts variants. Logs are written to `directory`; `connect` returns the connection to an
    endpoint's URL."""

    settings: CompareSettings
    connect: Connect
    directory: Path
    progress: Progress

    @asynccontextmanager
    async def running(self, variant: Variant) -> AsyncIterator[_RunningVariant]:
        """Run a variant until the context exits. Raises BenchError if it does not start."""
        self.progress.step(f"starting {variant.name}")
        settings, service, own = self.settings, None, None
        async with AsyncExitStack() as ending:
            if variant.url:
                target, model = self.connect(variant.url), settings.endpoint_model
            else:
                service, own = await self._start(variant, ending)
                make = GrpcTarget if settings.api == "grpc" else HttpTarget
                target, model = make(service.ready[settings.api]), None
            ending.push_async_callback(target.aclose)
            served = await target.model(model)
            if own is not None and served.vocab_size is None:
                served = replace(served, vocab_size=int(own.of_workers["vocab_size"][0]))
            kind: Literal["started", "endpoint"] = "started" if service else "endpoint"
            facts = VariantFacts(
                name=variant.name, kind=kind, api=settings.api, model=served.name, settings=own
            )
            yield _RunningVariant(facts, served, target, service, model)

    async def _start(
        self, variant: Variant, ending: AsyncExitStack
    ) -> tuple[LocalService | VllmStack, VariantSettings]:
        """Start the processes of a variant and read its settings. `ending` stops them."""
        directory = self.directory / variant.name
        if variant.stack is not None:
            stack = VllmStack(variant.name, variant.stack, directory)
            ending.push_async_callback(stack.stop)
            await stack.start()
            return stack, await stack.settings()
        service = LocalService(variant.name, variant.config, directory)
        ending.push_async_callback(service.stop)
        await service.start()
        prices = variant.config["router"]["prices"]
        return service, settings_of(await service.workers(), prices)


async def run_compare(
    settings: CompareSettings,
    variants: Sequence[Variant],
    connect: Connect,
    progress: Progress,
    *,
    directory: Path,
    before: CompareResult | None = None,
) -> AsyncIterator[CompareResult]:
    """Yield the result after each round and each probe. The last one is complete.

    Logs are written to `directory`. `connect` returns the connection to an endpoint's URL. `before`
    is an incomplete result of the same comparison, to continue it. If a variant is vLLM's, each is
    started for its part of a round and ended after it. Raises BenchError if a variant does not
    start or if the variants' settings differ.
    """
    trace = load_trace(settings.trace)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    running: dict[str, _RunningVariant] = {}
    starter = _Starter(settings, connect, directory, progress)
    # Servers of vLLM take processor time while they wait, so then only one variant runs at a time.
    takes_turns = any(variant.is_vllm for variant in variants)
    async with AsyncExitStack() as ending:
        # Start variants one after the other, because parallel starts would slow each other down.
        for variant in variants:
            one = starter.running(variant)
            if not takes_turns:
                running[variant.name] = await ending.enter_async_context(one)
                continue
            async with one as first:  # only to learn its settings
                running[variant.name] = first
        settings = _settled(settings, trace, list(running.values()))
        result = CompareResult(
            created=created,
            trace=trace.facts(),
            settings=asdict(settings) | {"scale_lengths": str(settings.scale_lengths)},
            host=host_facts(),
            slo_s=dict(settings.slo_s),
            baseline=settings.baseline,
            differ=settings.differ,
            is_complete=False,
            variants=tuple(x.facts for x in running.values()),
            measurements=(),
        )
        if before is not None:
            result = _continued(before, result)
        again = {x.name: x for x in variants} if takes_turns else {}
        measuring = _Measuring(settings, running, trace, progress, starter, again)
        async for measured in measuring.all(result.measurements):
            result = replace(result, measurements=measured)
            yield result
        yield replace(result, is_complete=True)


def _continued(before: CompareResult, now: CompareResult) -> CompareResult:
    """Return the result with the measurements of an interrupted run. Raises BenchError if its
    settings differ."""
    if before.trace["digest"] != now.trace["digest"]:
        raise BenchError(f"--resume: the kept result is of trace {before.trace['name']}")
    names = [[x.name for x in each.variants] for each in (before, now)]
    if names[0] != names[1]:
        raise BenchError(f"--resume: the kept result has the variants {', '.join(names[0])}")
    for name, value in jsonable(now.settings).items():
        kept = before.settings.get(name)
        if value != kept and name not in ("rounds", "probes"):
            raise BenchError(f"--resume: {name} is {value}, not {kept} as kept")
    return replace(now, created=before.created, measurements=before.measurements)


def _settled(
    settings: CompareSettings, trace: Trace, variants: Sequence[_RunningVariant]
) -> CompareSettings:
    """Return the settings with the values that depend on the variants. Raises BenchError if the
    variants' settings differ."""
    known = [x.facts.settings for x in variants if x.facts.settings is not None]
    found = differences({x.facts.name: x.facts.settings for x in variants}, settings.differ)
    if found:
        share = " (--kv-cache-mib shares a fixed amount between the workers of each)"
        texts = "; ".join(f"{name}: {values}" for name, values in found.items())
        raise BenchError(
            f"the variants differ in {texts}{share if KV_TOKENS in found else ''}. If this is what "
            f"you compare, add --differ {','.join(found)}"
        )
    devices = {device for x in known for device in x.of_workers.get("device", ())}
    scale = settings.scale_lengths
    if scale is None:
        scale = fitting_scale(trace) if known and devices <= {"cpu"} else Fraction(1)
    lengths = [settings.max_total_tokens, *(x.served.max_model_len for x in variants)]
    sizes = [x.served.vocab_size for x in variants]
    return replace(
        settings,
        scale_lengths=scale,
        # Use the smallest vocabulary and context of all, so that every variant gets the same
        # requests.
        vocab_size=settings.vocab_size or min((x for x in sizes if x), default=None),
        max_total_tokens=min((x for x in lengths if x), default=None),
    )


def fitting_scale(trace: Trace) -> Fraction:
    """Return the largest power of 1/2 that reduces the mean prompt to `CPU_MEAN_INPUT` tokens."""
    mean = sum(row.input_tokens for row in trace.requests) / len(trace.requests)
    scale = Fraction(1)
    while mean * scale > CPU_MEAN_INPUT:
        scale /= 2
    return scale


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Measures variants in turns. `again`: the variants, if each is started for each turn; then
    those in `running` have ended."""

    settings: CompareSettings
    running: Mapping[str, _RunningVariant]
    trace: Trace
    progress: Progress
    starter: _Starter
    again: Mapping[str, Variant]

    async def all(self, before: tuple[Measurement, ...]) -> AsyncIterator[tuple[Measurement, ...]]:
        """Yield all measurements so far after each round and each probe."""
        s, names = self.settings, list(self.running)
        found = [m for m in before if m.kind == "round"]
        probed = [m for m in before if m.kind == "probe"]

        async def measure(name: str, number: int) -> Measurement:
            return await self._measure(name, "round", number, s.rate_per_s, s.requests)

        first = len({m.number for m in found})
        warm_up = not self.again
        async for of_round in alternate(names, s.rounds, measure, first=first, warm_up=warm_up):
            found += of_round.values()
            yield (*found, *probed)
        found += probed
        for number in range(s.probes):
            for name in names if number % 2 == 0 else names[::-1]:
                own = [m for m in found if (m.variant, m.kind) == (name, "probe")]
                probes = probes_of(own, s.slo_s)
                rate = next_rate(probes, first=s.rate_per_s, limit=s.probes)
                if rate is None or len(probes) > number:
                    continue
                # Long enough for a queue to build up if the rate is too high.
                requests = max(s.requests, min(MAX_PROBE_REQUESTS, ceil(rate * s.probe_s)))
                found.append(await self._measure(name, "probe", number, rate, requests))
                yield tuple(found)

    async def _measure(
        self, name: str, kind: Kind, number: int, rate: float, requests: int
    ) -> Measurement:
        """Run one measurement, if variants take turns in a fresh start with its own warm-up."""
        if not self.again:
            return await self._replay(self.running[name], kind, number, rate, requests)
        async with self.starter.running(self.again[name]) as variant:
            known = {"before": self.running[name].facts.settings, "now": variant.facts.settings}
            if found := differences(known):
                raise BenchError(f"{name} has started with other settings than before: {found}")
            await self._replay(variant, "round", WARMUP, rate, requests)
            return await self._replay(variant, kind, number, rate, requests)

    async def _replay(
        self, variant: _RunningVariant, kind: Kind, number: int, rate: float, requests: int
    ) -> Measurement:
        """Replay the requests. Repeat it once with other prompts if the client was late."""
        s, name = self.settings, variant.facts.name
        is_warmup = number == WARMUP
        what = "warm-up" if is_warmup else f"{kind} {number + 1}"
        of = f" of {s.rounds}" if kind == "round" and not is_warmup else ""
        self.progress.step(f"{what}{of}, {name}, {rate:.2f}/s")
        # Each replay has new prompts, which no prefix cache has. They are the same for every
        # variant.
        place = 2 if is_warmup else int(kind == "probe")
        assert s.scale_lengths is not None
        shape = Shape(
            scale_lengths=s.scale_lengths,
            max_output_tokens=s.max_output_tokens,
            max_turns=s.max_turns,
            max_total_tokens=s.max_total_tokens,
            skip=number * s.requests if place == 0 else 0,
            limit=max(2, min(WARMUP_REQUESTS, requests)) if is_warmup else requests,
        )
        replay = ReplaySettings(
            trace=s.trace,
            shape=shape,
            rate_per_s=rate,
            seed=(3 * s.seed + place) * _SEEDS + max(0, number),
            drain_timeout_s=DRAIN_TIMEOUT_S,
            model=variant.model,
            vocab_size=s.vocab_size,
        )
        found = await self._once(variant, kind, number, replay)
        if is_warmup or summarise(found.records).degraded is None:
            return found
        again = replace(replay, seed=replay.seed + _SEEDS // 2)
        return replace(await self._once(variant, kind, number, again), repeated=True)

    async def _once(
        self, variant: _RunningVariant, kind: Kind, number: int, replay: ReplaySettings
    ) -> Measurement:
        idle = [x.ready for x in self.running.values() if x is not variant and x.ready]
        meter = ProcessorMeter(variant.ready, idle)
        result = await run_replay(replay, variant.target, self.progress, trace=self.trace)
        use = meter.use()
        problem = None if variant.service is None else await variant.service.problem()
        return Measurement(
            variant=variant.facts.name,
            kind=kind,
            number=number,
            rate_per_s=replay.rate_per_s or 0.0,
            speedup=result.settings["speedup"],
            workload=result.workload,
            processor=use,
            notes=() if problem is None else (problem,),
            records=result.records,
        )
