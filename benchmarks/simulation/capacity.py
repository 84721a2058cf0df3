"""At which rate workers are saturated, by arithmetic: a plan begins there. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from router.cost.step_model import Batch, prompt_work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulation.service_model import EngineModel


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the requests that are planned for, a pair (prompt, answer) each."""

    pairs: Sequence[tuple[int, int]]

    @property
    def prompt(self) -> float:
        return fmean(prompt for prompt, _ in self.pairs)

    @property
    def output(self) -> float:
        return fmean(output for _, output in self.pairs)

    @property
    def held(self) -> float:
        """Context of a request that decodes, seen at a moment: long answers are seen more often."""
        steps = sum(output for _, output in self.pairs)
        return sum(output * (prompt + output / 2) for prompt, output in self.pairs) / steps


@dataclass(frozen=True, slots=True)
class Saturation:
    """What one worker of each kind can do at most, in requests a second. `batch` requests decode at
    a time, with `step_s` between two tokens."""

    prefill_per_s: float
    decode_per_s: float
    aggregated_per_s: float
    batch: int
    step_s: float


def saturation(
    prefill: EngineModel, decode: EngineModel, lengths: Lengths, slo_tpot_s: float
) -> Saturation:
    """Of workers that are never without work, and keep the limit between two tokens."""
    first_s = fmean(prefill_s(prefill, prompt) for prompt, _ in lengths.pairs)
    batch = _batch(decode, lengths, slo_tpot_s)
    step_s = decode.steps.decode_step_s(Batch(batch, round(batch * lengths.held)))
    decode_s = max(1.0, lengths.output - 1) * step_s / batch
    # Its prompts share steps that are made in any case.
    prompt_s = fmean(decode.steps.prompt_s(prompt_work(prompt)) for prompt, _ in lengths.pairs)
    return Saturation(1 / first_s, 1 / decode_s, 1 / (decode_s + prompt_s), batch, step_s)


def prefill_s(engine: EngineModel, prompt: int) -> float:
    """Of a prompt that is computed alone."""
    work = prompt_work(prompt)
    return engine.steps.steps_of(work) * engine.steps.decode_step_s(
        Batch()
    ) + engine.steps.prompt_s(work)


def _batch(engine: EngineModel, lengths: Lengths, slo_tpot_s: float) -> int:
    """The most requests that fit an engine and decode within the limit; one at least."""
    kept = lengths.prompt + lengths.output
    most = min(engine.max_num_seqs, int(engine.capacity_tokens // max(1.0, kept)))
    fitting = [
        count
        for count in range(1, most + 1)
        if engine.steps.decode_step_s(Batch(count, round(count * lengths.held))) <= slo_tpot_s
    ]
    return max(fitting, default=1)
