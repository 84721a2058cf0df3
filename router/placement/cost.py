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

from msgspec import Struct

from pdserve.step_moments import (
    DECODE_KV_TOKENS,
    DECODE_REQS,
    PREFILL_PAIRS,
    PREFILL_TOKENS,
    StepMoments,
    fit_costs,
    pooled,
    total,
)
from pdserve.types import Role
from router.admission import LatencyEstimate
from router.placement.topology import PRIOR_S, apart
from router.placement.values import MemberState, Prediction

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import SloConfig
    from pdserve.step_moments import Moments
    from pdserve.types import Receipt, Usage
    from router.fleet.registry import Fleet
    from router.placement.values import Cached, Candidate, Decision, Demand

EARLY = 0.1
SPREAD = 0.3
# Aggregated prefill must be cheaper by this share and these seconds to be chosen.
MARGIN = 0.1
MARGIN_S = 0.002

MIN_STEPS = 8.0  # measured steps of a kind before anything is predicted
OWN_STEPS = 16.0  # measured steps of a kind before a worker is told from the others
MAX_EXTRAPOLATION = 8.0  # longest prompt predicted, over the longest measured
REFIT_S = 2.0
LEARNING_S = 0.1  # instead of it while prefill is unknown
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
        return _NO_BATCH
    if load is None:
        return Batch(candidate.outstanding_requests, candidate.reserved_blocks * info.block_size)
    used = max(0, info.total_blocks - load.free_blocks)
    return Batch(load.num_running_reqs, used * info.block_size)


class StepModel(Struct, frozen=True):
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

    def prompt_s(self, tokens: int, pairs: float) -> float:
        """Return what computing a prompt adds to the steps that it takes part in."""
        _, token, pair, _, _ = self.coefficients
        return token * tokens / PREFILL_TOKENS + pair * pairs / PREFILL_PAIRS

    def prefill_s(self, work: PromptWork, beside: Batch = _NO_BATCH) -> float | None:
        """Return the time to the first token while `beside` decodes in the same steps, None if it
        cannot be predicted."""
        if not self.knows_prefill or work.end > MAX_EXTRAPOLATION * self.prefill_end:
            return None
        steps = math.ceil(work.tokens / self.chunk_tokens) if self.chunk_tokens else 1
        return steps * self.decode_step_s(beside) + self.prompt_s(work.tokens, work.pairs)


def fit_steps(own: StepMoments, pool: StepMoments, chunk_tokens: int = 0) -> StepModel:
    """Fit a worker's steps. Those of `pool`, all workers of the model, stand for a kind of step of
    which the worker measured too few."""
    prefill, decode = _enough(own.prefill, pool.prefill), _enough(own.decode, pool.decode)
    both = total((prefill, decode))
    return StepModel(fit_costs(both), prefill.steps, decode.steps, both.end, chunk_tokens)


def _enough(own: Moments, pool: Moments) -> Moments:
    return own if own.steps >= OWN_STEPS or not pool.steps else pool


class Latency(Struct, frozen=True):
    """Predicted mean latency under a load; infinite if that is more than the workers can do."""

    ttft_s: float
    tpot_s: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.ttft_s + self.tpot_s)


def predicted_latencies(
    steps: StepModel, means: RequestMeans, prefill_workers: int, decode_workers: int
) -> tuple[Latency, Latency] | None:
    """Predict the requests of `means` on prefill and decode workers, and on as many aggregated
    ones. Return None while too little was measured.

    A worker that prefills `rate` prompts a second is a queue with constant service time (M/D/1). A
    share of a decode worker's time goes to its streams, by Little's law, and in an aggregated one
    also to prompts; a step takes that much longer.
    """
    prompt_tokens, gaps = round(means.prompt_tokens.value), max(1.0, means.gaps.value)
    work, rate = prompt_work(max(1, prompt_tokens)), 1.0 / max(means.interval_s.value, 1e-9)
    alone_s = steps.prefill_s(work)
    measured = min(means.gaps.count, means.transfer_s.count, means.interval_s.count)
    has_workers = prefill_workers and decode_workers
    if alone_s is None or not steps.knows_decode or measured < MIN_SAMPLES or not has_workers:
        return None
    stream = Batch(1, round(work.tokens + gaps / 2))
    step_s = steps.decode_step_s(stream)
    stream_s = step_s - steps.decode_step_s(_NO_BATCH)
    delay_s = steps.prompt_s(work.tokens, work.pairs)

    def ttft_s(prompts_per_s: float, service_s: float) -> float:
        used = prompts_per_s * service_s
        return service_s * (1.0 + used / (2.0 * (1.0 - used))) if used < 1.0 else math.inf

    def tpot_s(requests_per_s: float, prompt_s: float) -> float:
        used = requests_per_s * (gaps * stream_s + prompt_s)
        return step_s / (1.0 - used) if used < 1.0 else math.inf

    split = Latency(
        ttft_s(rate / prefill_workers, alone_s),
        tpot_s(rate / decode_workers, 0.0) + means.transfer_s.value / gaps,
    )
    each = rate / (prefill_workers + decode_workers)
    together_s = tpot_s(each, delay_s)
    return split, Latency(ttft_s(each, together_s + delay_s), together_s)


@dataclass(eq=False, slots=True)
class Ticket:
    """A prompt that waits or is computed on a worker."""

    worker_id: str
    work: PromptWork


@dataclass(slots=True)
class _PromptQueue:
    """Prompts that this router placed on a worker, in order, and their sums. `head_since` is when
    the first one's turn began."""

    head_since: float
    tickets: dict[Ticket, None] = field(default_factory=dict)
    tokens: int = 0
    pairs: float = 0.0

    def change(self, work: PromptWork, sign: int) -> None:
        self.tokens += sign * work.tokens
        self.pairs += sign * work.pairs


@dataclass(slots=True)
class _Fits:
    """Step models of a model's workers, as they had measured at `at`. `moments` are of all."""

    at: float
    moments: StepMoments
    pooled: StepModel
    by_worker: dict[str, StepModel] = field(default_factory=dict)


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
    `first_s` is from placement to the first token, `gaps` the output tokens less one, `interval_s`
    the time between two answers."""

    prompt_tokens: _Mean = field(default_factory=_Mean)
    prefill_s: _Mean = field(default_factory=_Mean)
    first_s: _Mean = field(default_factory=_Mean)
    decode_s: _Mean = field(default_factory=_Mean)
    gaps: _Mean = field(default_factory=_Mean)
    transfer_s: _Mean = field(default_factory=_Mean)
    interval_s: _Mean = field(default_factory=_Mean)
    answered_at: float = 0.0

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
        self._fits: dict[str, _Fits] = {}  # by model
        self._queues: dict[str, _PromptQueue] = {}  # by worker
        self._means: dict[str, RequestMeans] = {}  # by model
        self._transfers: dict[tuple[str, str], _Mean] = {}
        self._distances: dict[tuple[str, str], _Mean] = {}  # by model and topology.apart

    def step_model(self, worker_id: str) -> StepModel | None:
        """Return the step model of a registered worker."""
        member = self._fleet.members.get(worker_id)
        if member is None:
            return None
        fits = self._fits_of(member.info.model.name)
        model = fits.by_worker.get(worker_id)
        if model is None:
            told = member.info.settings.get("max_num_batched_tokens", "")
            chunk_tokens = int(told) if told.isdecimal() else 0
            model = fit_steps(member.steps or StepMoments(), fits.moments, chunk_tokens)
            fits.by_worker[worker_id] = model
        return model

    def _fits_of(self, model: str) -> _Fits:
        now, fits = self._clock(), self._fits.get(model)
        fresh_s = REFIT_S if fits is not None and fits.pooled.knows_prefill else LEARNING_S
        if fits is None or now - fits.at >= fresh_s:
            moments = pooled(m.steps for m in self._fleet.of_model(model) if m.steps is not None)
            fits = self._fits[model] = _Fits(now, moments, fit_steps(moments, StepMoments()))
        return fits

    def means(self, model: str) -> RequestMeans | None:
        """Return the means over the answered requests of a model, None if there are too few."""
        means = self._means.get(model)
        return means if means is not None and means.gaps.count >= MIN_SAMPLES else None

    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Predict the latency of a request of a model, for admission."""
        means = self.means(model)
        if means is None:
            return None
        prefill_s = self._fits_of(model).pooled.prefill_s(prompt_work(prompt_tokens))
        if prefill_s is None:
            return None
        wait_s = max(0.0, means.first_s.value - means.prefill_s.value)
        decode_s = means.decode_s.value * min(1.0, max_tokens / max(1.0, means.gaps.value))
        return LatencyEstimate(wait_s, prefill_s, decode_s)

    def disaggregation(self, model: str) -> str:
        """Say whether prefill/decode disaggregation helps at the load of the last requests."""
        found = self.counterfactual(model)
        if found is None:
            return "not enough data"
        told = [
            f"TTFT {x.ttft_s:.3f} s, TPOT {x.tpot_s:.4f} s" if x.is_finite else "overload"
            for x in found
        ]
        helps = "yes" if self.prefers(*found) else "no"
        return f"{helps}: predicted {told[0]}; aggregated {told[1]}"

    def counterfactual(self, model: str) -> tuple[Latency, Latency] | None:
        """Predict the last requests of a model on its prefill and decode workers, and on as many
        aggregated ones. Return None while too little was measured."""
        means = self.means(model)
        if means is None:
            return None
        ready = [m for m in self._fleet.of_model(model) if m.state is MemberState.READY]
        counts = [sum(m.info.role is x for m in ready) for x in (Role.PREFILL, Role.DECODE)]
        return predicted_latencies(self._fits_of(model).pooled, means, *counts)

    def prefers(self, first: Latency, second: Latency) -> bool:
        """Return True if the first latency costs less, measured by the SLO."""
        cost_s = [
            self._ttft_cost_s(x.ttft_s) + self._tpot_cost_s(x.tpot_s) for x in (first, second)
        ]
        return cost_s[0] < cost_s[1]

    def predict(
        self, demand: Demand, prefill: Candidate | None, decode: Candidate, cached: Cached
    ) -> Prediction | None:
        """Predict a placement, aggregated on `decode` without `prefill`. Return None while too
        little was measured."""
        steps, batch = self.step_model(decode.worker_id), decode_batch(decode)
        if steps is None or not steps.knows_decode:
            return None
        if prefill is None and batch.reqs >= decode.info.max_num_seqs:
            return None  # it would wait for a slot, for an unknown time
        worker, beside = (decode, batch) if prefill is None else (prefill, _NO_BATCH)
        work = _work(demand, worker, cached)
        first = self._first_token_s(worker.worker_id, work, beside)
        transfer_s: float | None = 0.0
        if prefill is not None:
            transfer_s = self._transfer_s(demand.model, prefill, decode)
        if first is None or transfer_s is None:
            return None
        queue_s, prefill_s = first
        itl_s, gaps = steps.decode_step_s(batch), self._gaps(demand.model)
        cost_s = self._ttft_cost_s(queue_s + prefill_s) + self._tpot_cost_s(
            itl_s + transfer_s / gaps
        )
        harm_s = 0.0
        if prefill is None:
            harm_s, harm_cost_s = self._harm(decode, steps, work, batch, gaps)
            cost_s += harm_cost_s
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

    def _harm(
        self, decode: Candidate, steps: StepModel, work: PromptWork, batch: Batch, gaps: float
    ) -> tuple[float, float]:
        """Return the delay of the streams of `decode` by a prompt there, and what it costs."""
        delay_s, before_s = steps.prompt_s(work.tokens, work.pairs), steps.decode_step_s(batch)
        streams = batch.reqs
        if queue := self._queues.get(decode.worker_id):
            streams += len(queue.tickets)
            before_s += steps.prompt_s(queue.tokens, queue.pairs) / gaps
        after_s = before_s + delay_s / gaps
        cost_s = streams * (self._tpot_cost_s(after_s) - self._tpot_cost_s(before_s))
        return streams * delay_s, cost_s

    def tier_worth(self, demand: Demand, worker: Candidate, cached: int, in_tiers: int) -> int:
        """Return the cached tokens that would save as much time as loading `in_tiers` tokens: all
        while the time of either is unknown; less than none if loading is slower than computing."""
        steps = self.step_model(worker.worker_id)
        if worker.load is None or steps is None or not steps.knows_prefill:
            return in_tiers
        before = prompt_work(demand.prompt_tokens, cached)
        after = prompt_work(demand.prompt_tokens, cached + in_tiers)
        saved_s = steps.prompt_s(before.tokens - after.tokens, before.pairs - after.pairs)
        share = worker.load.tier_token_s * in_tiers / saved_s if saved_s > 0.0 else 0.0
        return max(-cached, round(in_tiers * (1.0 - share)))

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
        prediction = None
        if not demand.prefill_only:
            names = (None if prefill is None else prefill.worker_id, decode.worker_id)
            made = {(p.prefill, p.decode): p for p in decision.predictions}
            prediction = made.get(names) or self.predict(demand, prefill, decode, decision.cached)
        worker = prefill or decode
        ticket = Ticket(worker.worker_id, _work(demand, worker, decision.cached))
        queue = self._queues.get(ticket.worker_id)
        if queue is None:
            queue = self._queues[ticket.worker_id] = _PromptQueue(self._clock())
        queue.tickets[ticket] = None
        queue.change(ticket.work, 1)
        return prediction, ticket

    def computed(self, ticket: Ticket) -> None:
        """A prompt was computed or given up. Telling so again does nothing."""
        queue = self._queues.get(ticket.worker_id)
        if queue is None or ticket not in queue.tickets:
            return
        if next(iter(queue.tickets)) is ticket:
            queue.head_since = self._clock()
        del queue.tickets[ticket]
        queue.change(ticket.work, -1)
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
        now = self._clock()
        if means.answered_at:
            means.interval_s.add(now - means.answered_at)
        means.answered_at = now
        if receipt.transport:
            means.transfer_s.add(exposed_s)
            found = map(self._fleet.members.get, (receipt.prefill_worker, receipt.decode_worker))
            prefill, decode = [{} if x is None else x.info.topology for x in found]
            key = (model, apart(prefill, decode))
            self._distances.setdefault(key, _Mean()).add(exposed_s)
            pair = (receipt.prefill_worker, receipt.decode_worker)
            self._transfers[pair] = self._transfers.pop(pair, _Mean())
            self._transfers[pair].add(exposed_s)
            if len(self._transfers) > MAX_PAIRS:
                del self._transfers[next(iter(self._transfers))]

    def _first_token_s(
        self, worker_id: str, work: PromptWork, beside: Batch
    ) -> tuple[float, float] | None:
        """Return the wait behind the prompts ahead, and the time from there to the first token. An
        engine computes prompts in order, several in a step if they fit."""
        steps, queue = self.step_model(worker_id), self._queues.get(worker_id)
        alone_s = None if steps is None else steps.prefill_s(work, beside)
        if steps is None or alone_s is None or queue is None:
            return None if alone_s is None else (0.0, alone_s)
        ahead = PromptWork(queue.tokens + work.tokens, queue.pairs + work.pairs, work.end)
        head = next(iter(queue.tickets)).work
        together_s = steps.prefill_s(ahead, beside)
        head_s = steps.prefill_s(PromptWork(head.tokens, head.pairs), beside)
        if together_s is None or head_s is None:
            return None
        done_s = min(self._clock() - queue.head_since, head_s)
        return max(0.0, together_s - done_s - alone_s), alone_s

    def distance_s(self, model: str, prefill: Candidate, decode: Candidate) -> float:
        """Return the mean wait for KV between workers as far apart as these, assumed while too
        little was measured; 0 for those that their labels do not tell apart."""
        level = apart(prefill.info.topology, decode.info.topology)
        mean = self._distances.get((model, level)) if level else None
        return mean.value if mean is not None and mean.count >= MIN_SAMPLES else PRIOR_S[level]

    def _transfer_s(self, model: str, prefill: Candidate, decode: Candidate) -> float | None:
        """Return the mean wait for KV between two workers, or between all as far apart. Return None
        if nothing was measured, and their labels do not tell them apart."""
        level = apart(prefill.info.topology, decode.info.topology)
        pair = self._transfers.get((prefill.worker_id, decode.worker_id))
        for mean in (pair, self._distances.get((model, level))):
            if mean is not None and mean.count >= MIN_SAMPLES:
                return mean.value
        return PRIOR_S[level] if level else None

    def _gaps(self, model: str) -> float:
        means = self._means.get(model)
        return FIRST_GAPS if means is None or not means.gaps.count else max(1.0, means.gaps.value)

    def _ttft_cost_s(self, ttft_s: float) -> float:
        return self.slo.ttft_s * _cost(ttft_s / self.slo.ttft_s)

    def _tpot_cost_s(self, tpot_s: float) -> float:
        return self.slo.ttft_s * _cost(tpot_s / self.slo.tpot_s)


def _cost(x: float) -> float:
    ramp = min(1.0, max(0.0, (x - 1.0 + SPREAD) / (2.0 * SPREAD)))
    return EARLY * x + (1.0 - EARLY) * ramp


def beats(cost_s: float, other_s: float) -> bool:
    """Return True if one cost is clearly lower than another."""
    return cost_s < other_s * (1.0 - MARGIN) - EARLY * MARGIN_S


def _work(demand: Demand, worker: Candidate, cached: Cached) -> PromptWork:
    return prompt_work(demand.prompt_tokens, cached.get(worker.worker_id, 0))
