"""What the modelled service consists of, in figures: from a profile, or as the fake engine is told.

Not modelled: how transfers that share a network slow each other down, what the router's own
processor time costs, and preemption, which the router's reservations keep from happening.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.errors import BenchError
from pdserve.step_moments import StepRecorder, StepShape
from pdserve.types import KvEndpoint, ModelInfo, Role, WorkerInfo
from router.cost.least_squares import fit
from router.cost.step_model import MIN_STEPS, StepModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.profiling.document import Profile, Sample, StepProfile, WorkerProfile
    from pdserve.step_moments import StepMoments

MODEL_NAME = "simulated"
_LONGEST = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One worker's engine; `steps` says how long its steps take."""

    steps: StepModel
    block_size: int
    total_blocks: int
    max_num_seqs: int
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def capacity_tokens(self) -> int:
        return self.block_size * self.total_blocks

    def blocks_for(self, tokens: int) -> int:
        """Never more than there are."""
        return min(-(-tokens // self.block_size), self.total_blocks)


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """`transfer_s` is what decode waits for KV after a prefill: base and a token's share.
    `overhead_s` is a request's way from the client into an engine's queue. Prompts up to
    `longest_prompt` were measured; 0 where nothing was."""

    engines: Mapping[Role, EngineModel]
    transfer_base_s: float = 0.0
    transfer_token_s: float = 0.0
    overhead_s: float = 0.0
    longest_prompt: int = 0

    def transfer_s(self, tokens: int) -> float:
        return self.transfer_base_s + self.transfer_token_s * max(0, tokens)

    def engine(self, role: Role) -> EngineModel:
        """Raises BenchError where there is none of the role."""
        found = self.engines.get(role)
        if found is None:
            raise BenchError(f"the profile has no {role} worker with measured steps")
        return found


def worker_info(role: Role, index: int, model: EngineModel) -> WorkerInfo:
    """How such a worker registers."""
    kv = None
    if role is not Role.AGGREGATED:
        kv = KvEndpoint(("simulated",), "simulated", {}, ("simulated",))
    chunk = model.steps.chunk_tokens
    return WorkerInfo(
        worker_id=f"{role}-{index}",
        epoch="1",
        role=role,
        model=ModelInfo(MODEL_NAME, "", _LONGEST, _LONGEST, "float32"),
        address="simulated",
        kv=kv,
        block_size=model.block_size,
        total_blocks=model.total_blocks,
        max_num_seqs=model.max_num_seqs,
        engine="simulated",
        settings={"max_num_batched_tokens": str(chunk)} if chunk else {},
    )


def of_profile(profile: Profile) -> ServiceModel:
    """The first worker of each role stands for all. Where a profile has no aggregated worker its
    decode worker stands for one too, and the other way round for both roles.

    Raises BenchError where no worker's steps were measured.
    """
    engines: dict[Role, EngineModel] = {}
    for worker in profile.workers:
        if worker.steps is not None and worker.role not in engines:
            engines[worker.role] = _engine(worker, worker.steps)
    for role, others in _STAND_INS.items():
        known = [engines[other] for other in others if other in engines]
        able = [x for x in known if x.steps.prefill_steps >= MIN_STEPS]
        if role not in engines and able:
            engines[role] = able[0]
    if not engines:
        raise BenchError("the profile says of no worker what its steps cost")
    base_s, token_s = _transfer(profile.samples)
    return ServiceModel(
        engines,
        base_s,
        token_s,
        _overhead_s(profile.samples),
        max(x.steps.prefill_end for x in engines.values()),
    )


_STAND_INS: dict[Role, tuple[Role, ...]] = {
    Role.AGGREGATED: (Role.DECODE, Role.PREFILL),
    Role.PREFILL: (Role.AGGREGATED,),
    Role.DECODE: (Role.AGGREGATED,),
}


def _engine(worker: WorkerProfile, steps: StepProfile) -> EngineModel:
    model = StepModel(
        steps.coefficients,
        steps.prefill_steps,
        steps.decode_steps,
        steps.prefill_end,
        steps.error,
        steps.chunk_tokens,
    )
    return EngineModel(
        model, worker.block_size, worker.total_blocks, worker.max_num_seqs, worker.settings
    )


def _transfer(samples: Sequence[Sample]) -> tuple[float, float]:
    """Base and rate of the exposed transfers of those that were alone, or of all."""
    moved = [x for x in samples if x.transfer_bytes]
    alone = [x for x in moved if x.concurrency == 1] or moved
    if not alone:
        return 0.0, 0.0
    n, x, y = float(len(alone)), [s.prompt_tokens / 1e3 for s in alone], []
    y = [s.exposed_transfer_s for s in alone]
    sums = ((n, sum(x)), (sum(x), sum(v * v for v in x)))
    base_s, rate_s = fit(sums, (sum(y), sum(a * b for a, b in zip(x, y, strict=True))))
    return base_s, rate_s / 1e3


def _overhead_s(samples: Sequence[Sample]) -> float:
    alone = [x for x in samples if x.concurrency == 1] or list(samples)
    if not alone:
        return 0.0
    return max(0.0, median(x.ttft_s - x.queue_s - x.prefill_s for x in alone))


def known_moments(model: EngineModel, role: Role) -> StepMoments:
    """What a worker of the role has told its router after a while of work: the router of the
    simulation learns of costs as one that joins a running service does."""
    recorder = StepRecorder()
    longest = model.steps.prefill_end or 2048
    if role is not Role.DECODE:
        lengths = sorted({max(1, longest >> shift) for shift in range(8)})
        for length in lengths:
            _observe(recorder, model, StepShape(length, length * length / 2, length))
    if role is not Role.PREFILL:
        for batch in sorted({max(1, model.max_num_seqs >> shift) for shift in range(8)}):
            for context in (64, 512, longest):
                shape = StepShape(decode_reqs=batch, decode_kv_tokens=batch * context)
                _observe(recorder, model, shape)
    return recorder.moments(0.0)


def _observe(recorder: StepRecorder, model: EngineModel, shape: StepShape) -> None:
    for _ in range(4):
        recorder.observe(shape, model.steps.step_s(shape), 0.0)
