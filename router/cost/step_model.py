"""How long an engine's steps take, and what follows from it. Pure; times in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.step_moments import (
    DECODE_KV_TOKENS,
    DECODE_REQS,
    FEATURES,
    PAIRS,
    PREFILL_PAIRS,
    PREFILL_TOKENS,
    Moments,
    StepMoments,
    total,
)
from router.cost.least_squares import fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.step_moments import StepShape

# Steps of a kind, the worker's own or its like's, before anything is said of that kind.
MIN_STEPS = 8.0
# Up to so many steps of a kind, what other workers of the model saw stands in for what a worker
# has not seen itself.
PRIOR_STEPS = 16.0
# Prompts so many times longer than any seen are not guessed at.
MAX_EXTRAPOLATION = 8.0


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What is left to compute of one prompt or several: `tokens`, and the `pairs` of tokens that
    attend to each other. `end` is the longest context."""

    tokens: int = 0
    pairs: float = 0.0
    end: int = 0

    def __add__(self, other: PromptWork) -> PromptWork:
        return PromptWork(
            self.tokens + other.tokens, self.pairs + other.pairs, max(self.end, other.end)
        )


def prompt_work(tokens: int, cached: int = 0) -> PromptWork:
    """Of a prompt whose first `cached` tokens have KV: the last token is always computed."""
    cached = min(cached, tokens - 1)
    return PromptWork(tokens - cached, (tokens**2 - cached**2) / 2, tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """What an engine decodes at the same time: requests, and their context in tokens."""

    reqs: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepModel:
    """`coefficients` belong to the features of pdserve/step_moments.py, in seconds. `error` is the
    root mean square of the relative error of the fit, over the steps that it was made from."""

    coefficients: tuple[float, ...]
    prefill_steps: float
    decode_steps: float
    prefill_end: int
    error: float
    chunk_tokens: int = 0

    @property
    def knows_prefill(self) -> bool:
        return self.prefill_steps >= MIN_STEPS

    @property
    def knows_decode(self) -> bool:
        return self.decode_steps >= MIN_STEPS

    def step_s(self, shape: StepShape) -> float:
        """How long a step of `shape` takes."""
        return sum(c * x for c, x in zip(self.coefficients, shape.features, strict=True))

    def decode_step_s(self, batch: Batch) -> float:
        """A step that only decodes. Written out: a placement asks for a dozen."""
        step, _, _, request, context = self.coefficients
        return (
            step + request * batch.reqs / DECODE_REQS + context * batch.kv_tokens / DECODE_KV_TOKENS
        )

    def steps_of(self, work: PromptWork) -> int:
        """Into how many steps prompts are cut: one, where the engine does not cut them."""
        if not work.tokens:
            return 0
        return math.ceil(work.tokens / self.chunk_tokens) if self.chunk_tokens else 1

    def prompt_s(self, work: PromptWork) -> float:
        """What computing prompts adds to the steps that it takes part in."""
        _, token, pair, _, _ = self.coefficients
        return token * work.tokens / PREFILL_TOKENS + pair * work.pairs / PREFILL_PAIRS

    def prefill_s(self, work: PromptWork, beside: Batch = Batch()) -> float | None:
        """From the first step with these prompts to their first tokens, while `beside` is decoded
        in the same steps. None where that is not known."""
        if not self.knows_prefill or work.end > MAX_EXTRAPOLATION * self.prefill_end:
            return None
        if not work.tokens:
            return 0.0
        return self.steps_of(work) * self.decode_step_s(beside) + self.prompt_s(work)


def fit_steps(
    own: StepMoments, prior: StepMoments | None = None, *, chunk_tokens: int = 0
) -> StepModel:
    """A worker's model from its own moments; where they are few, those of its like help out."""
    prefill, decode = own.prefill, own.decode
    if prior is not None:
        prefill, decode = _filled(prefill, prior.prefill), _filled(decode, prior.decode)
    sums = total((prefill, decode))
    matrix = [[0.0] * FEATURES for _ in range(FEATURES)]
    for (i, j), value in zip(PAIRS, sums.xx, strict=True):
        matrix[i][j] = matrix[j][i] = value
    found = fit(matrix, sums.xy)
    error = _error(sums, matrix, found)
    return StepModel(found, prefill.steps, decode.steps, sums.end, error, chunk_tokens)


def _filled(own: Moments, prior: Moments) -> Moments:
    """With as many steps of the prior as there lack to PRIOR_STEPS."""
    lacking = PRIOR_STEPS - own.steps
    if lacking <= 0 or not prior.steps:
        return own
    return total((own, prior.scaled(min(1.0, lacking / prior.steps))))


def _error(sums: Moments, matrix: Sequence[Sequence[float]], found: tuple[float, ...]) -> float:
    if not sums.steps:
        return 0.0
    explained = 2 * sum(b * y for b, y in zip(found, sums.xy, strict=True))
    power = sum(
        a * b * cell
        for a, row in zip(found, matrix, strict=True)
        for b, cell in zip(found, row, strict=True)
    )
    return math.sqrt(max(0.0, sums.yy - explained + power) / sums.steps)
