"""Run fault scenarios against a service, and compare every answer with that of a service without
faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from benchmarks.chaos.capsules import keep_capsules
from benchmarks.chaos.load import KINDS, Clients, make_questions, right_answers, wrong_tokens
from benchmarks.chaos.scenarios import REPEATED, MissedError, Run
from benchmarks.chaos.service import ServiceUnderTest
from benchmarks.errors import BenchError
from benchmarks.report.tables import print_table
from pdserve.config import load_config, to_mapping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.chaos.load import ObservedAnswer
    from benchmarks.chaos.scenarios import Scenario
    from benchmarks.progress import Progress

TRIES: Final = 3  # for a fault that did not affect anything
EMPTY_S: Final = 30.0  # longer than the hold of KV blocks
FAULT_S: Final = 900.0
# Leases and timeouts are shorter than the defaults, so that scenarios are short. KV caches are
# small, and prompts are computed in several chunks. With float32, the shape of a batch does not
# change which token is the most likely.
_CONFIG: Final[Mapping[str, Any]] = {
    "router.http.port": 0,
    "router.grpc.port": 0,
    "router.health.eject_s": 1.0,
    "router.stop_grace_s": 5.0,
    "router.request_timeout_s": 120.0,
    "router.capsules.prompts": True,  # they are made up
    "worker.drain_timeout_s": 10.0,
    "worker.kv.hold_s": 8.0,
    "up.max_restart_pause_s": 1.0,  # restart killed processes soon
}
_ENGINE_ARGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {"dtype": "float32", "kv_cache_memory_bytes": 96 << 20, "max_num_batched_tokens": 256},
    "fake": {"step_s": 0.01, "prefill_s": 0.0005, "transfer_s": 0.02},
}
# The single engine of the service without faults. It must not time out, however slow it is.
REFERENCE: Final[tuple[tuple[str, Any], ...]] = (
    ("up.prefill.workers", 0),
    ("up.decode.workers", 0),
    ("up.aggregated.workers", 1),
    ("up.cores_per_worker", 1),
    ("router.lease_s", 600.0),
    ("router.health.stall_s", 0.0),
    ("router.request_timeout_s", 600.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Settings of the matrix. `changes`: dotted configuration keys that override the matrix's.
    `models`: the folder of checkpoints of storms."""

    engine: str = "vllm"
    prefill: int = 2
    decode: int = 2
    requests: int = 24
    rate_per_s: float = 6.0
    seed: int = 1
    models: Path | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    def config(
        self, own: Sequence[tuple[str, Any]] = (), run_dir: Path | None = None
    ) -> dict[str, Any]:
        """Return the configuration of a service. `own`: dotted keys that override all others, with
        folders to be filled in."""
        keys = {**_CONFIG, "worker.engine": self.engine}
        keys |= {f"worker.engine_args.{k}": x for k, x in _ENGINE_ARGS[self.engine].items()}
        keys |= dict(self.changes) | {
            "up.prefill.workers": self.prefill,
            "up.decode.workers": self.decode,
        }
        folders = {"{models}": str(self.models), "{run}": str(run_dir)}
        for key, value in own:
            keys[key] = value
            if isinstance(value, str):
                for mark, folder in folders.items():
                    keys[key] = keys[key].replace(mark, folder)
        return to_mapping(load_config(None, keys))

    def missing(self, scenario: Scenario) -> str:
        """Return why a scenario cannot run, or ""."""
        absent = [
            x for x in scenario.files if self.models is None or not (self.models / x).is_dir()
        ]
        return f"no {absent[0]} in --models" if absent else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one scenario. `failed`: requests that must not fail but did; `hangs`: those of
    them that neither ended nor failed in CLIENT_TIMEOUT_S. `allowed_failures`: requests that the
    fault itself ended. `deaths`: workers that died of themselves. `pause_s`: longest wait of a
    client. `whole_s`: time from the fault until all processes were ready again. `aborts`: by
    point. `capsules`: files of answers that failed or are wrong, for `pdserve replay`."""

    fault: str
    what: str
    hit: bool
    requests: int
    failed: int
    allowed_failures: int
    wrong_tokens: int
    leaked_blocks: int
    left: Sequence[str]
    pause_s: float
    whole_s: float
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    errors: Sequence[str] = ()
    capsules: Sequence[str] = ()
    hangs: int = 0
    deaths: Sequence[str] = ()
    aborts: Mapping[str, int] = field(default_factory=dict)
    handed_over: int = 0
    copied_tokens: int = 0

    @property
    def passed(self) -> bool:
        """True if the fault took place, and nothing was lost, wrong or leaked."""
        lost = self.failed or self.wrong_tokens or self.leaked_blocks
        bad = lost or self.left or self.deaths
        return self.hit and not bad

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


async def run_matrix(
    settings: ChaosSettings, scenarios: Sequence[Scenario], directory: Path, progress: Progress
) -> AsyncIterator[Row]:
    """Yield a row for each scenario. Raises BenchError if a service does not start or recover."""
    place = 0
    for of_model in _alike(scenarios, lambda x: x.model):
        async with AsyncExitStack() as ending:
            progress.step("starting the engine for the right answers")
            right = await _reference(
                settings, of_model[0], directory / f"reference-{place}", ending
            )
            # Start one service for all scenarios with the same configuration.
            for group in _alike(of_model, lambda x: (x.config, x.copies_always)):
                async with AsyncExitStack() as own:
                    progress.step("starting the service")
                    service = _service(settings, group[0], directory / f"service-{place}")
                    own.push_async_callback(service.stop)
                    await service.start()
                    clients = await own.enter_async_context(aclosing(Clients(service)))
                    for scenario in group:
                        services = (service, clients, right)
                        yield await _tried(settings, scenario, services, place, directory, progress)
                        place += 1


def _alike(
    scenarios: Sequence[Scenario], key: Callable[[Scenario], object]
) -> list[list[Scenario]]:
    """Return the scenarios in groups of equal `key`, in the order of the first of each."""
    groups: dict[object, list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault(key(scenario), []).append(scenario)
    return list(groups.values())


async def _reference(
    settings: ChaosSettings, scenario: Scenario, directory: Path, ending: AsyncExitStack
) -> Clients:
    """Start the engine for the right answers of a scenario's model, until `ending`."""
    config = settings.config((*scenario.model, *REFERENCE), directory)
    reference = ServiceUnderTest(config, directory)
    ending.push_async_callback(reference.stop)
    await reference.start()
    return await ending.enter_async_context(aclosing(Clients(reference)))


def _service(settings: ChaosSettings, scenario: Scenario, directory: Path) -> ServiceUnderTest:
    config = settings.config((*scenario.model, *scenario.config), directory)
    return ServiceUnderTest(config, directory, copies_always=scenario.copies_always)


async def _tried(
    settings: ChaosSettings,
    scenario: Scenario,
    services: tuple[ServiceUnderTest, Clients, Clients],
    place: int,
    directory: Path,
    progress: Progress,
) -> Row:
    """Run a scenario until its fault affects something, up to TRIES times. `services`: the one
    under test, its clients, and those of the engine for the right answers."""
    service, clients, right = services
    for attempt in range(place * TRIES, (place + 1) * TRIES):
        run = await _prepared(settings, scenario, service, clients, attempt)
        progress.step(f"{scenario.name}: computing the right answers")
        expected = await right_answers(right, list(run.questions.values()))
        row = await _row(scenario, run, expected, progress, directory / "capsules")
        if scenario.copies_always and not row.copied_tokens:
            row = replace(row, hit=False, notes=[*row.notes, "no prefix was copied"])
        if row.hit or row.failed or row.wrong_tokens:
            break
    return row


async def _prepared(
    settings: ChaosSettings,
    scenario: Scenario,
    service: ServiceUnderTest,
    clients: Clients,
    attempt: int,
) -> Run:
    """Return a run of requests that have not been sent before."""
    # The fake engine has no structured output. Only gRPC clients continue at a second router, and
    # only answers with a single output.
    kinds = [
        kind
        for kind in scenario.kinds or KINDS
        if settings.engine != "fake" or kind != "structured"
    ]
    if clients.has_failover:
        kinds = [kind for kind in kinds if KINDS[kind][0] == "grpc" and kind != "n"]
    questions = make_questions(
        settings.requests,
        seed=settings.seed,
        vocab_size=(await clients.grpc.model(service.ready["model"])).vocab_size or 0,
        kinds=kinds,
        first=attempt * settings.requests,
        models=("", *scenario.adapters),
        sessions=scenario.sessions,
    )
    chance = random.Random(f"{settings.seed}/{attempt}")
    by_number = {question.number: question for question in questions}
    rate = settings.rate_per_s
    return Run(service, clients, by_number, rate, chance, at_once=scenario.at_once)


async def _row(
    scenario: Scenario,
    run: Run,
    expected: Mapping[int, ObservedAnswer],
    progress: Progress,
    capsules: Path,
) -> Row:
    """Send the requests, inject the fault, and compare the answers. `capsules`: a folder."""
    progress.step(f"{scenario.name}: requests run")
    running = asyncio.create_task(run.load())
    hit = True
    try:
        async with asyncio.timeout(FAULT_S):
            try:
                await scenario.run(run)
            except MissedError as missed:
                hit = False
                run.notes.append(str(missed))
            run.may_send.set()
            await running
    except TimeoutError:
        raise BenchError(f"{scenario.name} did not finish in {FAULT_S:g} s") from None
    finally:
        running.cancel()
    progress.step(f"{scenario.name}: waiting until all processes are ready")
    await run.service.until_whole()
    whole_s = time.monotonic() - run.struck_s if run.struck_s else 0.0
    left = await run.service.until_empty(EMPTY_S)
    deaths = await run.service.take_deaths()
    answers = run.answers.values()
    failed = [x for x in answers if x.ending != "ok"]
    blamed = [x for x in failed if not run.allows(x)]
    wrong = {x.number: wrong_tokens(x, expected[x.number % REPEATED]) for x in answers}
    bad = [*blamed, *(x for x in answers if wrong[x.number] and x not in blamed)]
    kept = await keep_capsules(scenario.name, run, bad, expected, capsules)
    errors = [f"request {x.number}: {x.error or x.ending}" for x in blamed]
    errors += [f"request {n}: {count} wrong tokens" for n, count in wrong.items() if count]
    return Row(
        fault=scenario.name,
        what=scenario.what,
        hit=hit,
        requests=len(answers),
        failed=len(blamed),
        allowed_failures=len(failed) - len(blamed),
        wrong_tokens=sum(wrong.values()),
        leaked_blocks=sum(blocks for blocks, _ in left),
        left=[text for _, text in left],
        pause_s=round(max((x.pause_s for x in answers if not x.slow_s), default=0.0), 3),
        whole_s=round(whole_s, 3),
        fallbacks=dict(sorted(Counter(s for x in answers for s in x.fallbacks).items())),
        notes=run.notes,
        errors=errors[:5],
        capsules=kept,
        hangs=sum(x.error.startswith("TimeoutError") for x in blamed),
        deaths=deaths,
        aborts=dict(run.aborts),
        handed_over=sum(x.is_handed_over for x in answers),
        copied_tokens=sum(x.copied_tokens for x in answers),
    )


def print_rows(rows: Sequence[Row]) -> None:
    """Print the matrix as a table."""
    columns = ["fault", "requests", "aborts", "failed", "hangs", "allowed", "wrong tokens"]
    columns += ["deaths", "leaked blocks"]
    cells = [
        [
            row.fault,
            *(row.requests, sum(row.aborts.values()), row.failed, row.hangs, row.allowed_failures),
            *(row.wrong_tokens, len(row.deaths), row.leaked_blocks),
            f"{row.pause_s:.1f} s",
            f"{row.whole_s:.1f} s",
            "ok" if row.passed else "FAILED" if row.hit else "not hit",
        ]
        for row in rows
    ]
    print_table([*columns, "longest pause", "whole after", ""], cells)
