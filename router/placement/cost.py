"""Cost model: predicts the latency of a placement from what workers measured.

TTFT = wait behind prompts that were placed before + prefill time (a step model fitted for each
worker). Then decode waits for the exposed part of the KV transfer. All times are in seconds.

What counts is latency targets kept. A latency well within its limit costs a little, in proportion;
one well beyond it has broken the target, and more delay costs only a little again. In between,
where a prediction may err either way, the cost rises steeply:

    x = latency / limit        cost = EARLY · x + (1 - EARLY) · ramp(x)
                               ramp: 0 up to 1 - SPREAD, 1 from 1 + SPREAD on

One broken target costs `slo.ttft_s` seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from pdserve.step_moments import (
    DECODE_KV_TOKENS,
    DECODE_REQS,
    FEATURES,
    PAIRS,
    PREFILL_PAIRS,
    PREFILL_TOKENS,
    StepMoments,
    pooled,
    total,
)
from pdserve.types import Role
from router.admission import LatencyEstimate
from router.placement.values import Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.config import SloConfig
    from pdserve.step_moments import Moments
    from pdserve.types import Receipt, Usage
    from router.fleet.registry import Fleet
    from router.placement.values import Candidate, Decision, Demand

EARLY = 0.1
SPREAD = 0.3
# Aggregated prefill must be cheaper by this share and these seconds to be chosen.
MARGIN = 0.1
MARGIN_S = 0.002
# From this share of used slots on, the next request may find none.
CROWDED = 0.5

MIN_STEPS = 8.0  # measured steps of a kind before anything is predicted
PRIOR_STEPS = 16.0  # up to this many steps, other workers' measurements fill in
MAX_EXTRAPOLATION = 8.0  # longest prompt predicted, over the longest measured
RIDGE = 1e-4  # keeps features that never varied apart from each other
REFIT_S = 2.0
PRIOR_S = 5.0
LEARNING_S = 0.1  # instead of both while prefill is unknown
MIN_SAMPLES = 5.0
REMEMBERED = 64.0
MAX_PAIRS = 4096
FIRST_GAPS = 16.0  # gaps between tokens in an answer, before any was seen


class PromptWork(Struct, frozen=True):
    """Prefill left to do: `tokens`, the `pairs` of tokens that attend to each other, and the `end`
    of the longest context."""

    tokens: int = 0
    pairs: float = 0.0
    end: int = 0

    def __add__(self, other: PromptWork) -> PromptWork:
        return PromptWork(
            self.tokens + other.tokens, self.pairs + other.pairs, max(self.end, other.end)
        )


def prompt_work(tokens: int, cached: int = 0) -> PromptWork:
    """Return the work of a prompt with `cached` tokens; the last token is always computed."""
    cached = min(cached, tokens - 1)
    return PromptWork(tokens - cached, (tokens**2 - cached**2) / 2, tokens)


class Batch(Struct, frozen=True):
    """Requests that an engine decodes together, and the sum of their context tokens."""

    reqs: int = 0
    kv_tokens: int = 0


_NO_BATCH = Batch()


def decode_batch(candidate: Candidate) -> Batch:
    """Return what a worker decodes now: as it reported, otherwise as this router placed."""
    info, load = candidate.info, candidate.load
    if candidate.role is Role.PREFILL:
        return Batch()
    if load is None:
        return Batch(candidate.outstanding_requests, candidate.reserved_blocks * info.block_size)
    used = max(0, info.total_blocks - load.free_blocks)
    return Batch(load.num_running_reqs, used * info.block_size)


@dataclass(frozen=True, slots=True)
class StepModel:
    """Duration of an engine step, linear in the features of pdserve/step_moments.py."""

    coefficients: tuple[float, ...]
    prefill_steps: float = 0.0
    decode_steps: float = 0.0
    prefill_end: int = 0
    chunk_tokens: int = 0

    @property
    def knows_prefill(self) -> bool:
        return self.prefill_steps >= MIN_STEPS

    @property
    def knows_decode(self) -> bool:
        return self.decode_steps >= MIN_STEPS

    def decode_step_s(self, batch: Batch) -> float:
        step, _, _, request, context = self.coefficients
        return (
            step + request * batch.reqs / DECODE_REQS + context * batch.kv_tokens / DECODE_KV_TOKENS
        )

    def prompt_s(self, work: PromptWork) -> float:
        """Return what computing a prompt adds to the steps that it takes part in."""
        _, token, pair, _, _ = self.coefficients
        return token * work.tokens / PREFILL_TOKENS + pair * work.pairs / PREFILL_PAIRS

    def prefill_s(self, work: PromptWork, beside: Batch = _NO_BATCH) -> float | None:
        """Return the time to the first token while `beside` decodes in the same steps, None if it
        cannot be predicted."""
        if not self.knows_prefill or work.end > MAX_EXTRAPOLATION * self.prefill_end:
            return None
        if not work.tokens:
            return 0.0
        steps = math.ceil(work.tokens / self.chunk_tokens) if self.chunk_tokens else 1
        return steps * self.decode_step_s(beside) + self.prompt_s(work)


def fit_steps(own: StepMoments, prior: StepMoments, chunk_tokens: int = 0) -> StepModel:
    """Fit a worker's steps; `prior`, of all workers of the model, fills in for missing ones."""
    prefill = _filled(own.prefill, prior.prefill)
    decode = _filled(own.decode, prior.decode)
    sums = total((prefill, decode))
    matrix = np.zeros((FEATURES, FEATURES))
    for (i, j), value in zip(PAIRS, sums.xx, strict=True):
        matrix[i, j] = matrix[j, i] = value
    found = fit_costs(matrix, np.array(sums.xy))
    # The prior includes the worker's own steps: they must not count twice.
    return StepModel(
        tuple(found.tolist()),
        max(own.prefill.steps, prior.prefill.steps),
        max(own.decode.steps, prior.decode.steps),
        sums.end,
        chunk_tokens,
    )


def _filled(own: Moments, prior: Moments) -> Moments:
    missing = PRIOR_STEPS - own.steps
    if missing <= 0 or not prior.steps:
        return own
    return total((own, prior.scaled(min(1.0, missing / prior.steps))))


def fit_costs(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """Return the non-negative least-squares solution for the moments `xx` and `xy`. The most
    negative coefficient is removed until there is none."""
    found = np.zeros(len(xy))
    active = np.flatnonzero(np.diag(xx) > 1e-12)
    while active.size:
        matrix = xx[np.ix_(active, active)]
        matrix = matrix + RIDGE * np.diag(np.diag(matrix))
        solved = np.linalg.solve(matrix, xy[active])
        if solved.min() >= 0:
            found[active] = solved
            break
        active = np.delete(active, solved.argmin())
    return found


@dataclass(eq=False, slots=True)
class Ticket:
    """A prompt that waits or is computed on a worker."""

    worker_id: str
    work: PromptWork


@dataclass(slots=True)
class _PromptQueue:
    """Prompts that this router placed on a worker, in order. `head_since` is when the first one's
    turn began."""

    head_since: float
    tickets: dict[Ticket, None] = field(default_factory=dict)
    tokens: int = 0
    pairs: float = 0.0

    def add(self, ticket: Ticket, sign: int) -> None:
        self.tokens += sign * ticket.work.tokens
        self.pairs += sign * ticket.work.pairs


@dataclass(slots=True)
class _Mean:
    """A moving mean over about the last REMEMBERED values."""

    count: float = 0.0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.count = min(REMEMBERED, self.count + 1.0)
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class RequestMeans:
    """Moving means over the answered requests of a model. `prompt_tokens` are computed ones,
    `first_s` is from placement to the first token, `gaps` the output tokens less one."""

    prompt_tokens: _Mean = field(default_factory=_Mean)
    prefill_s: _Mean = field(default_factory=_Mean)
    first_s: _Mean = field(default_factory=_Mean)
    decode_s: _Mean = field(default_factory=_Mean)
    gaps: _Mean = field(default_factory=_Mean)
    transfer_s: _Mean = field(default_factory=_Mean)

    @property
    def is_known(self) -> bool:
        return self.gaps.count >= MIN_SAMPLES

    @property
    def decoding_share(self) -> float:
        """Share of a request's time on its decode worker in which it decodes."""
        return self.decode_s.value / max(self.first_s.value + self.decode_s.value, 1e-9)


class CostModel:
    """Predictions for placement and admission, from what the workers of `fleet` measured and what
    `placed`, `computed` and `answered` are told."""

    def __init__(self, fleet: Fleet, slo: SloConfig, clock: Callable[[], float]) -> None:
        self.slo = slo
        self._fleet = fleet
        self._clock = clock
        self._fitted: dict[str, tuple[StepModel, float]] = {}
        self._priors: dict[str, tuple[StepMoments, StepModel, float]] = {}
        self._queues: dict[str, _PromptQueue] = {}
        self._stalls: dict[str, tuple[float, float]] = {}
        self._means: dict[str, RequestMeans] = {}
        self._transfers: dict[tuple[str, str], _Mean] = {}

    def step_model(self, worker_id: str) -> StepModel | None:
        """Return the step model of a registered worker."""
        member = self._fleet.members.get(worker_id)
        if member is None:
            return None
        now = self._clock()
        known = self._fitted.get(worker_id)
        if known is not None:
            fresh_s = REFIT_S if known[0].knows_prefill else LEARNING_S
            if now - known[1] < fresh_s:
                return known[0]
        prior, _ = self._prior(member.info.model.name, now)
        chunk = member.info.settings.get("max_num_batched_tokens", "")
        own = member.steps or StepMoments()
        model = fit_steps(own, prior, int(chunk) if chunk.isdecimal() else 0)
        self._fitted[worker_id] = model, now
        return model

    def _prior(self, model: str, now: float) -> tuple[StepMoments, StepModel]:
        """Return the measurements of all workers of a model, and the step model of them."""
        known = self._priors.get(model)
        if known is not None:
            fresh_s = PRIOR_S if known[1].knows_prefill else LEARNING_S
        if known is None or now - known[2] >= fresh_s:
            for gone in self._fitted.keys() - self._fleet.members.keys():
                del self._fitted[gone]
            for gone in self._stalls.keys() - self._fleet.members.keys():
                del self._stalls[gone]
            moments = pooled(m.steps for m in self._fleet.of_model(model) if m.steps is not None)
            known = self._priors[model] = moments, fit_steps(moments, StepMoments()), now
        return known[0], known[1]

    def means(self, model: str) -> RequestMeans | None:
        """Return the means over the answered requests of a model, None if there are too few."""
        means = self._means.get(model)
        return means if means is not None and means.is_known else None

    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Predict the latency of a request of a model, for admission."""
        means = self.means(model)
        if means is None:
            return None
        _, steps = self._prior(model, self._clock())
        prefill_s = steps.prefill_s(prompt_work(prompt_tokens))
        if prefill_s is None:
            return None
        wait_s = max(0.0, means.first_s.value - means.prefill_s.value)
        decode_s = means.decode_s.value * min(1.0, max_tokens / max(1.0, means.gaps.value))
        return LatencyEstimate(wait_s, prefill_s, decode_s)

    def predict(
        self,
        demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        cached: Mapping[str, int],
    ) -> Prediction | None:
        """Predict a placement, aggregated on `decode` without `prefill`. Return None while too
        little was measured."""
        decode_model = self.step_model(decode.worker_id)
        if decode_model is None or not decode_model.knows_decode:
            return None
        batch, gaps = decode_batch(decode), self._gaps(demand.model)
        itl_s = decode_model.decode_step_s(batch)
        work = _work(demand, prefill or decode, cached)
        if prefill is not None:
            model = self.step_model(prefill.worker_id)
            first = self._first_token_s(prefill.worker_id, work, model, Batch())
            transfer_s = self._transfer_s(demand.model, (prefill.worker_id, decode.worker_id))
            if first is None or transfer_s is None:
                return None
            harm_s = harm_cost_s = 0.0
        else:
            if batch.reqs >= decode.info.max_num_seqs:
                return None  # it would wait for a slot, for an unknown time
            first, transfer_s = (
                self._first_token_s(decode.worker_id, work, decode_model, batch),
                0.0,
            )
            if first is None:
                return None
            stall_s = decode_model.prompt_s(work)
            waiting = self._queues.get(decode.worker_id)
            streams = batch.reqs + (0 if waiting is None else len(waiting.tickets))
            harm_s = streams * stall_s
            before_s = itl_s + self._stalled_s(decode.worker_id, gaps * itl_s) / gaps
            harm_cost_s = streams * (
                self._tpot_cost_s(before_s + stall_s / gaps) - self._tpot_cost_s(before_s)
            )
            # While the worker is crowded, each stream gives up its slot that much later.
            crowded = min(1.0, max(0.0, (decode.used - CROWDED) / (1.0 - CROWDED)))
            steepest = EARLY + (1.0 - EARLY) / (2.0 * SPREAD)
            harm_cost_s += crowded * decode.outstanding_requests * stall_s * steepest
        queue_s, prefill_s = first
        cost_s = self._ttft_cost_s(queue_s + prefill_s) + harm_cost_s
        cost_s += self._tpot_cost_s(itl_s + transfer_s / gaps)
        return Prediction(
            None if prefill is None else prefill.worker_id,
            decode.worker_id,
            queue_s + prefill_s,
            harm_s,
            transfer_s,
            queue_s,
            itl_s,
            cost_s,
        )

    def has_capacity(self, demand: Demand, decode: Candidate) -> bool:
        """Return False if the predicted TPOT of `decode` with one more request exceeds
        `reject_factor × tpot_s`."""
        limit_s = self.slo.tpot_s * self.slo.reject_factor
        if not limit_s or demand.prefill_only or not decode.outstanding_requests:
            return True
        model = self.step_model(decode.worker_id)
        if model is None or not model.knows_decode:
            return True
        means, batch = self.means(demand.model), decode_batch(decode)
        context = batch.kv_tokens / batch.reqs if batch.reqs else demand.prompt_tokens
        # The prompts of the others are still being computed elsewhere.
        decoding = decode.outstanding_requests * (1.0 if means is None else means.decoding_share)
        alone_s = model.decode_step_s(Batch(1, round(context)))
        slope_s = model.decode_step_s(Batch(2, round(2 * context))) - alone_s
        return alone_s + decoding * slope_s <= limit_s

    def placed(self, decision: Decision) -> tuple[Prediction | None, Ticket]:
        """Record a placement. Return its prediction, and a ticket for `computed`."""
        placement, demand = decision.placement, decision.demand
        assert placement is not None, "the request was placed"
        decode, prefill = placement.decode, placement.prefill
        worker = prefill or decode
        work, now = _work(demand, worker, decision.cached), self._clock()
        prediction = None
        if not demand.prefill_only:
            names = (None if prefill is None else prefill.worker_id, decode.worker_id)
            made = {(p.prefill, p.decode): p for p in decision.predictions}
            prediction = made.get(names) or self.predict(demand, prefill, decode, decision.cached)
        if prefill is None and decode.role is Role.DECODE:
            self._add_stall(demand.model, decode, work, now)
        ticket = Ticket(worker.worker_id, work)
        queue = self._queues.get(ticket.worker_id)
        if queue is None:
            queue = self._queues[ticket.worker_id] = _PromptQueue(now)
        queue.tickets[ticket] = None
        queue.add(ticket, 1)
        return prediction, ticket

    def computed(self, ticket: Ticket) -> None:
        """A prompt was computed or given up. Telling so again does nothing."""
        queue = self._queues.get(ticket.worker_id)
        if queue is None or ticket not in queue.tickets:
            return
        if next(iter(queue.tickets)) is ticket:
            queue.head_since = self._clock()
        del queue.tickets[ticket]
        queue.add(ticket, -1)
        if not queue.tickets:
            del self._queues[ticket.worker_id]

    def answered(
        self, model: str, usage: Usage, receipt: Receipt, *, ttft_s: float, e2e_s: float
    ) -> None:
        """Record a request that was answered at its first attempt; times count from placement."""
        means = self._means.setdefault(model, RequestMeans())
        means.prompt_tokens.add(max(1, usage.prompt_tokens - usage.cached_tokens))
        means.prefill_s.add(receipt.prefill_s)
        means.first_s.add(ttft_s)
        means.gaps.add(max(0, usage.completion_tokens - 1))
        exposed_s = receipt.exposed_transfer_s if receipt.transport else 0.0
        means.decode_s.add(max(0.0, e2e_s - ttft_s - exposed_s))
        if receipt.transport:
            pair = (receipt.prefill_worker, receipt.decode_worker)
            transfers = self._transfers.pop(pair, None) or _Mean()
            self._transfers[pair] = transfers
            if len(self._transfers) > MAX_PAIRS:
                del self._transfers[next(iter(self._transfers))]
            transfers.add(exposed_s)
            means.transfer_s.add(exposed_s)

    def _first_token_s(
        self, worker_id: str, work: PromptWork, model: StepModel | None, beside: Batch
    ) -> tuple[float, float] | None:
        """Return the wait behind the prompts ahead, and the time from there to the first token. An
        engine computes prompts in order, several in a step if they fit."""
        alone_s = None if model is None else model.prefill_s(work, beside)
        queue = self._queues.get(worker_id)
        if model is None or alone_s is None or queue is None:
            return None if alone_s is None else (0.0, alone_s)
        together_s = model.prefill_s(PromptWork(queue.tokens, queue.pairs) + work, beside)
        head = next(iter(queue.tickets)).work
        head_s = model.prefill_s(PromptWork(head.tokens, head.pairs), beside)
        if together_s is None or head_s is None:
            return None
        done_s = min(self._clock() - queue.head_since, head_s)
        return max(0.0, together_s - done_s - alone_s), alone_s

    def _transfer_s(self, model: str, pair: tuple[str, str]) -> float | None:
        own, means = self._transfers.get(pair), self._means.get(model)
        if own is not None and own.count >= MIN_SAMPLES:
            return own.value
        if means is None or means.transfer_s.count < MIN_SAMPLES:
            return None
        return means.transfer_s.value

    def _gaps(self, model: str) -> float:
        means = self._means.get(model)
        return FIRST_GAPS if means is None or not means.gaps.count else max(1.0, means.gaps.value)

    def _add_stall(self, model: str, decode: Candidate, work: PromptWork, now: float) -> None:
        """A prompt was placed on a decode worker: it delays the streams there."""
        steps = self.step_model(decode.worker_id)
        if steps is not None:
            life_s = self._gaps(model) * steps.decode_step_s(decode_batch(decode))
            stalled_s = self._stalled_s(decode.worker_id, life_s) + steps.prompt_s(work)
            self._stalls[decode.worker_id] = stalled_s, now

    def _stalled_s(self, worker_id: str, life_s: float) -> float:
        """Return by how much prompts delay a stream that lives for `life_s` on this worker."""
        stalled_s, since = self._stalls.get(worker_id, (0.0, 0.0))
        passed_s = max(0.0, self._clock() - since)
        return stalled_s * math.exp(-passed_s / life_s) if life_s > 0 else 0.0

    def _ttft_cost_s(self, ttft_s: float) -> float:
        return self.slo.ttft_s * _cost(ttft_s / self.slo.ttft_s)

    def _tpot_cost_s(self, tpot_s: float) -> float:
        return self.slo.ttft_s * _cost(tpot_s / self.slo.tpot_s)


def _cost(x: float) -> float:
    ramp = min(1.0, max(0.0, (x - 1.0 + SPREAD) / (2.0 * SPREAD)))
    return EARLY * x + (1.0 - EARLY) * ramp


def beats(aggregated_s: float, disaggregated_s: float) -> bool:
    """Return True if aggregated prefill is clearly cheaper."""
    return aggregated_s < disaggregated_s * (1.0 - MARGIN) - EARLY * MARGIN_S


def _work(demand: Demand, worker: Candidate, cached: Mapping[str, int]) -> PromptWork:
    return prompt_work(demand.prompt_tokens, cached.get(worker.worker_id, 0))
