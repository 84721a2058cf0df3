"""Simulate a service: the router's own code and fake engines on an event loop with virtual time.

Nothing of the router or of the workers is modelled a second time. The loop does not sleep: when no
task can run, its clock jumps to the next timer. Router and workers share one process. The cost of
an engine step is linear in its prompt tokens and its decoding requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import socket
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from benchmarks.client import ServedModel, Target, piece_of
from benchmarks.errors import BenchError, TargetError
from benchmarks.replay import ReplaySettings, read_json, run_replay
from benchmarks.traces import Trace, TraceMeta, TraceRequest
from pdserve import deadline
from pdserve.errors import PdserveError
from pdserve.types import GenerateRequest, ModelInfo, Role, WorkerInfo
from router.background import background
from router.decisions import DecisionLog
from router.fleet.registry import Fleet
from router.main import make_services
from router.metrics import RouterMetrics
from router.request import RequestServer
from workers.fake.engine import FakeEngine
from workers.fake.settings import FakeKv, FakeSettings
from workers.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from benchmarks.client import Piece, Request
    from benchmarks.progress import Progress
    from benchmarks.replay import ReplayResult
    from benchmarks.workload import Shape
    from pdserve.config import RouterConfig
    from router.answer import AnswerDelta

_MODEL: Final = ModelInfo("simulated", "", 1 << 20, 1024, "float32")
_NEVER_S: Final = 1e9
_TICK_S: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of an engine step: `step_s`, and so much for each prompt token and each request that
    decodes in it. `transfer_s` passes between the end of prefill and the first decode step.

    The defaults are those of the demo model on one core of a server from 2023.
    """

    step_s: float = 0.004
    prefill_s: float = 0.00004
    decode_s: float = 0.0002
    transfer_s: float = 0.002

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Raises BenchError."""
        try:
            return cls(**{name: float(x) for name, x in read_json(path).items()})
        except (BenchError, ValueError, TypeError, AttributeError) as error:
            raise BenchError(f"{path} holds no step costs: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A service and its load: requests come at `rate_per_s`, as the trace spaces them."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    costs: Costs = Costs()
    max_num_seqs: int = 64
    total_blocks: int = 8192
    rate_per_s: float = 4.0
    requests: int = 400
    seed: int = 0
    slo_s: Mapping[str, float]

    @property
    def name(self) -> str:
        apart = f"{self.prefill}P{self.decode}D" if self.prefill or self.decode else ""
        return apart + (f"{self.aggregated}A" if self.aggregated else "")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when no task can run."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        # A timer that is set again for the same moment, by a rounding error, would stop the clock.
        return super().call_at(max(when, self.time() + _TICK_S), callback, *args, context=context)


class _VirtualSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("the simulation waits for something that never happens")
        if not ready:
            self.now += timeout or 0.0
        return ready


def connect_in_process(services: Mapping[str, WorkerService]) -> Any:
    """Return what `Fleet` uses to connect to a worker, here by its id."""

    async def connect(info: WorkerInfo, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(services[info.worker_id].new_session, theirs)
        await loop.create_connection(make_protocol, sock=ours)

    return connect


class _SimulatedTarget(Target):
    """A router in this process."""

    kind = "simulated"

    def __init__(self, server: RequestServer, timeout_s: float) -> None:
        super().__init__("virtual time")
        self._server = server
        self._timeout_s = timeout_s

    async def _models(self) -> list[ServedModel]:
        return [ServedModel(_MODEL.name, _MODEL.max_model_len, _MODEL.vocab_size)]

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        out = _Out()
        made = GenerateRequest(request.request_id, request.model, request.body, request.sampling)
        made.deadline = deadline.after(self._timeout_s)
        serving = asyncio.create_task(self._server.serve(made, out))
        serving.add_done_callback(lambda _: out.pieces.put_nowait(None))
        while (piece := await out.pieces.get()) is not None:
            yield piece
        try:
            await serving
        except PdserveError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from None


class _Out:
    """Where the router writes one answer; None ends it."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

    def write(self, delta: AnswerDelta) -> bool:
        self.pieces.put_nowait(piece_of(delta))
        return True


def simulate(
    setup: Setup, config: RouterConfig, trace: Trace, shape: Shape, progress: Progress
) -> ReplayResult:
    """Serve a trace and return what a replay of the real service would. The same setup gives the
    same result. Raises BenchError."""
    settings = ReplaySettings(
        trace=trace.meta.name,
        shape=replace(shape, limit=setup.requests),
        rate_per_s=setup.rate_per_s,
        seed=setup.seed,
        warmup=0,
        drain_timeout_s=_NEVER_S,
        slo_s=setup.slo_s,
    )
    random.seed(setup.seed)  # of pauses with jitter

    async def serve() -> ReplayResult:
        clock = asyncio.get_running_loop().time
        async with AsyncExitStack() as stack:
            target = await _start(setup, config, stack)
            return await run_replay(settings, target, progress, trace=trace, clock=clock)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(serve())
    return replace(
        result,
        target={**result.target, "name": setup.name},
        settings={**result.settings, **asdict(setup), "policy": config.policy},
    )


async def _start(setup: Setup, config: RouterConfig, stack: AsyncExitStack) -> _SimulatedTarget:
    services: dict[str, WorkerService] = {}
    fleet = Fleet(
        router_id="router",
        lease_s=_NEVER_S,
        health=config.health,
        connect=connect_in_process(services),
    )
    server = RequestServer(make_services(config, fleet, RouterMetrics(), DecisionLog(1)))
    workers = [(role, n) for role in Role for n in range(getattr(setup, role.value))]
    for role, number in workers:
        name = f"{role}-{number}"
        settings = FakeSettings(
            max_num_seqs=setup.max_num_seqs,
            total_blocks=setup.total_blocks,
            **asdict(setup.costs),
            kv=None if role is Role.AGGREGATED else FakeKv(instance_id=name, host=""),
        )
        service = services[name] = WorkerService(FakeEngine(_MODEL, settings), role, name)
        stack.push_async_callback(service.close)
        engine = await service.start()
        fleet.register(
            WorkerInfo(
                worker_id=name,
                instance_id=name,
                role=role,
                model=engine.model,
                address=name,
                session_address=name,
                kv=engine.kv,
                block_size=engine.block_size,
                total_blocks=engine.total_blocks,
                max_num_seqs=engine.max_num_seqs,
                engine=engine.name,
            )
        )
    await stack.enter_async_context(fleet)
    await stack.enter_async_context(background("admit", server.admit_queued))
    # Let workers and router meet, so that the first request finds them ready.
    await asyncio.sleep(1.0)
    return _SimulatedTarget(server, config.request_timeout_s)


def drawn_trace(mean_input: int, mean_output: int, *, requests: int, seed: int) -> Trace:
    """Draw lengths from gamma distributions with a deviation of half the mean, and arrivals at
    random."""
    chance = random.Random(f"lengths {seed}")

    def draw(mean: int) -> int:
        return max(1, round(chance.gammavariate(4.0, mean / 4.0)))

    at_s = itertools.accumulate(chance.expovariate(1.0) for _ in range(requests))
    rows = tuple(TraceRequest(x, draw(mean_input), draw(mean_output)) for x in at_s)
    meta = TraceMeta(name=f"{mean_input} tokens in, {mean_output} out", format="drawn")
    return Trace(meta, rows)
