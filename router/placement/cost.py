"""Cost model: predicts the latency of a placement from what workers measured.

TTFT = wait behind earlier prompts + prefill time (a step model fitted for each worker). Then decode
waits for the exposed part of the KV transfer. All times are in seconds.

The cost counts missed latency targets. A latency well within its limit costs a little, in
proportion. A latency well beyond it has missed the target, and more delay costs only a little
again. Between them a prediction may err either way, and the cost rises steeply:

    x = latency / limit        cost = EARLY · x + (1 - EARLY) · ramp(x)
                               ramp: 0 up to 1 - SPREAD, 1 from 1 + SPREAD on

One missed target costs `slo.ttft_s` seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct, structs

from pdserve.observe.step_costs import (
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
from router.placement.topology import PRIOR_S, distance
from router.placement.values import MemberState, Prediction, PrefixFetch, may_hold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.config import SloConfig
    from pdserve.observe.step_costs import Moments
    from pdserve.types import Receipt, Regions, Usage, WorkerInfo
    from router.placement.values import Cached, Candidate, Decision, Demand

EARLY = 0.1
SPREAD = 0.3
# Aggregated prefill is chosen only if it is cheaper by this share and these seconds. Otherwise
# errors of the prediction would decide, and a prompt on a decode worker delays its streams.
MARGIN = 0.1
MARGIN_S = 0.002
# Advice on disaggregation at the recent load. Differences up to ALIKE do not count.
ALIKE = 0.1
Verdict = Literal["yes", "no", "about equal", "overload"]
ADVICE: Final[Mapping[Verdict, str]] = {
    "yes": "Keep separate prefill and decode workers",
    "no": "As many aggregated workers would serve this load better; `pdserve bench compare` checks",
    "about equal": "The difference is within 10 %: neither is worth a change at this load",
    "overload": "This load is too much for either: add workers, or send less",
}

MIN_STEPS = 8.0  # measured steps of a kind before anything is predicted
OWN_STEPS = 16.0  # measured steps of a kind before a worker is fitted by itself
MAX_EXTRAPOLATION = 8.0  # longest predicted prompt / longest measured prompt
REFIT_S = 2.0
LEARNING_S = 0.1  # replaces REFIT_S while prefill has not been measured
MIN_SAMPLES = 5.0
REMEMBERED = 64.0
MAX_PAIRS = 4096
# Assumed time of a copy of cached KV outside of engine steps, before the first measurement.
FETCH_S = 0.005
FETCH_TOKEN_S = 1e-5
FAR_TOKENS = 1 << 16  # length of the longer of the two copies that are assumed
RELEARN_S = 60.0  # measured copies older than this do not reflect the current load
FIRST_GAPS = 16.0  # assumed gaps between tokens in an answer, before the first answer


class PromptWork(Struct, frozen=True):
    """Remaining prefill work. `tokens`: to compute. `pairs`: pairs of tokens that attend to each
    other. `end`: length of the longest context."""

    tokens: int = 0
    pairs: float = 0.0
    end: int = 0


def prompt_work(tokens: int, cached: int = 0) -> PromptWork:
    """Return the work of a prompt of which `cached` tokens are cached; the last token is always
    computed."""
    cached = min(cached, tokens - 1)
    return PromptWork(tokens - cached, (tokens**2 - cached**2) / 2, tokens)


class Batch(Struct, frozen=True):
    """Requests that an engine decodes together, and the sum of their context tokens."""

    reqs: int = 0
    kv_tokens: int = 0


_NO_BATCH = Batch()


def decode_batch(candidate: Candidate) -> Batch:
    """Return the batch that a worker decodes now: as reported or, before its first report, as
    placed by this router."""
    info, load = candidate.info, candidate.load
    if candidate.role is Role.PREFILL:
        return _NO_BATCH  # its requests are in prefill; `_queues` counts them
    if load is None:
        return Batch(candidate.outstanding_requests, candidate.reserved_blocks * info.block_size)
    used = max(0, info.total_blocks - load.free_blocks)
    return Batch(load.num_running_reqs, used * info.block_size)


class StepModel(Struct, frozen=True):
    """Duration of an engine step, linear in the features of pdserve/observe/step_costs.py."""

    coefficients: tuple[float, ...]
    prefill_steps: float = 0.0
    decode_steps: float = 0.0
    prefill_end: int = 0
    chunk_tokens: int = 0  # 0: the engine computes a prompt in one step

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

    def prompt_s(self, tokens: float, pairs: float) -> float:
        """Return the time that a prompt adds to the steps that compute it."""
        _, token, pair, _, _ = self.coefficients
        return token * tokens / PREFILL_TOKENS + pair * pairs / PREFILL_PAIRS

    def prefill_s(self, work: PromptWork, running: Batch = _NO_BATCH) -> float | None:
        """Return the time to the first token while the batch `running` decodes in the same steps.
        Return None if it cannot be predicted."""
        # The fit says little about prompts far longer than any measured one.
        if not self.knows_prefill or work.end > MAX_EXTRAPOLATION * self.prefill_end:
            return None
        steps_s = self.steps_of(work.tokens) * self.decode_step_s(running)
        return steps_s + self.prompt_s(work.tokens, work.pairs)

    def steps_of(self, tokens: int) -> int:
        """Return the number of steps that compute prompts of `tokens` tokens."""
        return math.ceil(tokens / self.chunk_tokens) if self.chunk_tokens else 1


def fit_steps(own: StepMoments, pool: StepMoments, chunk_tokens: int = 0) -> StepModel:
    """Fit the step model of a worker. `pool`, the steps of all workers of the model, stands in for
    a kind of step that the worker measured too rarely."""
    prefill, decode = _enough(own.prefill, pool.prefill), _enough(own.decode, pool.decode)
    both = total((prefill, decode))
    return StepModel(fit_costs(both), prefill.steps, decode.steps, both.end, chunk_tokens)


def _enough(own: Moments, pool: Moments) -> Moments:
    return own if own.steps >= OWN_STEPS or not pool.steps else pool


class Latency(Struct, frozen=True):
    """Predicted mean latency under a load; infinite if the load exceeds the workers' capacity."""

    ttft_s: float
    tpot_s: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.ttft_s + self.tpot_s)


def predicted_latencies(
    steps: StepModel, means: RequestMeans, prefill_workers: int, decode_workers: int
) -> tuple[Latency, Latency] | None:
    """Predict the mean latency of requests like `means` on prefill and decode workers, and on the
    same number of aggregated workers. Return None while there are too few measurements.

    A worker that prefills `rate` prompts a second is a queue with constant service time (M/D/1). By
    Little's law its streams use a share of a decode worker's time, and prompts too if it is
    aggregated. A step takes longer by that share.
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


class QueuedPrompt(Struct, eq=False):
    """A prompt that is queued or being computed on a worker."""

    worker_id: str
    work: PromptWork


class _PromptQueue(Struct):
    """Prompts that this router placed on a worker, in order, and their summed work. `head_since`:
    when the first prompt reached the head of the queue."""

    head_since: float
    prompts: dict[QueuedPrompt, None] = {}
    tokens: int = 0
    pairs: float = 0.0

    def change(self, work: PromptWork, sign: int) -> None:
        self.tokens += sign * work.tokens
        self.pairs += sign * work.pairs


@dataclass(slots=True)
class _Fits:
    """Step models of a model's workers, fitted at time `at`. `moments` sums the steps of all
    workers, and `pooled` is fitted to them."""

    at: float
    moments: StepMoments
    pooled: StepModel
    by_worker: dict[str, StepModel] = field(default_factory=dict)


@dataclass(slots=True)
class _Mean:
    """Moving mean over about the last REMEMBERED values."""

    count: float = 0.0
    value: float = 0.0

    def add(self, value: float) -> None:
        if self.count < REMEMBERED:
            self.count += 1.0
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class _CopyTime:
    """Seconds of a copy as a line over its tokens, fitted to about the last REMEMBERED copies.

    It begins with two assumed copies. Without the longer one, a few short copies would determine
    the prediction for very long ones. `at`: time of the last copy. `sums`: sums of 1, tokens,
    tokens², seconds, tokens·seconds.
    """

    at: float
    sums: tuple[float, float, float, float, float]

    @classmethod
    def assumed(cls, now: float, fixed_s: float) -> _CopyTime:
        far_s = fixed_s + FAR_TOKENS * FETCH_TOKEN_S
        return cls(
            now, (2.0, FAR_TOKENS, float(FAR_TOKENS**2), fixed_s + far_s, FAR_TOKENS * far_s)
        )

    def add(self, now: float, tokens: int, seconds: float) -> None:
        kept = 1.0 - 1.0 / REMEMBERED
        new = (1.0, tokens, tokens**2, seconds, tokens * seconds)
        n, x, xx, y, xy = (kept * old + value for old, value in zip(self.sums, new, strict=True))
        self.at, self.sums = now, (n, x, xx, y, xy)

    def seconds(self, tokens: int) -> float:
        n, x, xx, y, xy = self.sums
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 0.0 else 0.0
        return max(0.0, (y - slope * x) / n) + slope * tokens


@dataclass(slots=True)
class RequestMeans:
    """Moving means over the answered requests of a model. `prompt_tokens`: uncached prompt tokens.
    `first_s`: from placement to the first token. `gaps`: output tokens minus one. `interval_s`:
    time between two answers.
    """

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
        """Share of its time on the decode worker that a request decodes. It waits for prefill the
        rest."""
        return self.decode_s.value / max(self.first_s.value + self.decode_s.value, 1e-9)


class MeasuredWorker(Protocol):
    """A registered worker and the engine steps that it measured, None before its first report."""

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def steps(self) -> StepMoments | None: ...
    @property
    def state(self) -> MemberState: ...
    def snapshot(self) -> Candidate: ...


class MeasuredFleet(Protocol):
    """All registered workers, by id and by model."""

    @property
    def members(self) -> Mapping[str, MeasuredWorker]: ...
    def of_model(self, name: str) -> Iterable[MeasuredWorker]: ...


class CostModel:
    """Predictions for placement and admission. Inputs: step times that the workers of `fleet`
    report, and requests recorded by `placed`, `computed` and `answered`."""

    def __init__(
        self,
        fleet: MeasuredFleet,
        slo: SloConfig,
        clock: Callable[[], float],
        *,
        refit_s: float = REFIT_S,
        max_pairs: int = MAX_PAIRS,
    ) -> None:
        """`refit_s`: interval between fits. `max_pairs`: pairs of workers whose transfers are
        remembered."""
        self.slo = slo
        self._refit_s, self._max_pairs = refit_s, max_pairs
        self._fleet = fleet
        self._clock = clock
        self._fits: dict[str, _Fits] = {}  # by model
        self._queues: dict[str, _PromptQueue] = {}  # by worker
        self._means = defaultdict[str, RequestMeans](RequestMeans)  # by model
        self._encodes = defaultdict[str, _Mean](_Mean)  # by model: seconds per image token
        self._transfers: dict[tuple[str, str], _Mean] = {}
        # By model and topology.distance.
        self._distances = defaultdict[tuple[str, str], _Mean](_Mean)
        self._copies: dict[tuple[str, str], _CopyTime] = {}  # likewise

    def step_model(self, worker_id: str) -> StepModel | None:
        """Return the step model of a registered worker."""
        member = self._fleet.members.get(worker_id)
        if member is None:
            return None
        fits = self._fits_of(member.info.model.name)
        model = fits.by_worker.get(worker_id)
        if model is None:
            chunk_tokens = member.info.limits.max_num_batched_tokens
            model = fit_steps(member.steps or StepMoments(), fits.moments, chunk_tokens)
            fits.by_worker[worker_id] = model
        return model

    def _fits_of(self, model: str) -> _Fits:
        now, fits = self._clock(), self._fits.get(model)
        # Refit more often until prefill is fitted, because nothing can be predicted before.
        fresh_s = self._refit_s if fits is not None and fits.pooled.knows_prefill else LEARNING_S
        if fits is None or now - fits.at >= fresh_s:
            moments = pooled(m.steps for m in self._fleet.of_model(model) if m.steps is not None)
            fits = self._fits[model] = _Fits(now, moments, fit_steps(moments, StepMoments()))
        return fits

    def means(self, model: str) -> RequestMeans | None:
        """Return the means over the answered requests of a model, None after too few."""
        means = self._means.get(model)
        return means if means is not None and means.gaps.count >= MIN_SAMPLES else None

    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Predict the latency of a request for admission. Return None while there are too few
        measurements."""
        means = self.means(model)
        if means is None:
            return None
        prefill_s = self._fits_of(model).pooled.prefill_s(prompt_work(prompt_tokens))
        if prefill_s is None:
            return None
        wait_s = max(0.0, means.first_s.value - means.prefill_s.value)
        decode_s = means.decode_s.value * min(1.0, max_tokens / max(1.0, means.gaps.value))
        return LatencyEstimate(wait_s, prefill_s, decode_s)

    def busy_s(
        self, model: str, batch: Batch, prompt_tokens: int, output_tokens: float
    ) -> tuple[float, float] | None:
        """Predict a request's shares of prefill steps and of decode steps, which it shares with
        `batch`. Return None while there are too few measurements."""
        steps, work = self._fits_of(model).pooled, prompt_work(max(1, prompt_tokens))
        prefill_s = steps.prefill_s(work)
        if prefill_s is None or not steps.knows_decode:
            return None
        shared = Batch(batch.reqs + 1, batch.kv_tokens + work.end)
        return prefill_s, output_tokens * steps.decode_step_s(shared) / shared.reqs

    def disaggregation(self, model: str) -> str:
        """Return a sentence that says whether disaggregation helps at the recent load."""
        found = self.counterfactual(model)
        if found is None:
            return "not enough data"
        texts = [
            f"TTFT {x.ttft_s:.3f} s, TPOT {x.tpot_s:.4f} s" if x.is_finite else "overload"
            for x in found
        ]
        verdict = self.verdict(*found)
        means = f"predicted means {texts[0]}; aggregated {texts[1]}"
        return f"{verdict}: {means}. {ADVICE[verdict]}"

    def counterfactual(self, model: str) -> tuple[Latency, Latency] | None:
        """Predict the mean latency of recent requests on the model's prefill and decode workers,
        and on the same number of aggregated workers. Return None while there are too few
        measurements."""
        means = self.means(model)
        if means is None:
            return None
        ready = [m for m in self._fleet.of_model(model) if m.state is MemberState.READY]
        counts = [sum(m.info.role is x for m in ready) for x in (Role.PREFILL, Role.DECODE)]
        return predicted_latencies(self._fits_of(model).pooled, means, *counts)

    def verdict(self, split: Latency, aggregated: Latency) -> Verdict:
        """Compare two predictions by their cost. A difference of at most ALIKE, in cost or in both
        latencies, counts as equal, because it is within the prediction error."""
        if not (split.is_finite or aggregated.is_finite):
            return "overload"
        pairs = [*zip(structs.astuple(split), structs.astuple(aggregated), strict=True)]
        cost_s = [
            self._ttft_cost_s(x.ttft_s) + self._tpot_cost_s(x.tpot_s) for x in (split, aggregated)
        ]
        if all(_alike(*pair) for pair in pairs) or _alike(*cost_s):
            return "about equal"
        return "yes" if cost_s[0] < cost_s[1] else "no"

    def predict(
        self, demand: Demand, prefill: Candidate | None, decode: Candidate, cached: Cached
    ) -> Prediction | None:
        """Predict a placement. Without `prefill` it is aggregated on `decode`. Return None while
        there are too few measurements."""
        steps = self.step_model(decode.worker_id)
        if steps is None or not steps.knows_decode:
            return None
        if prefill is None and decode_batch(decode).reqs >= decode.info.limits.max_num_seqs:
            return None  # it would wait for a slot, for an unknown time
        batches = [decode_batch(rank) for rank in self._ranks_of(decode)]
        batch = max(batches, key=steps.decode_step_s)
        worker, running = (decode, batch) if prefill is None else (prefill, _NO_BATCH)
        work = _work(demand, worker, cached)
        first = self._first_token_s(worker, work, running)
        if first is None:
            return None
        transfer_s = 0.0 if prefill is None else self._transfer_s(demand.model, prefill, decode)
        queue_s, prefill_s = first
        itl_s, gaps = steps.decode_step_s(batch), self._gaps(demand.model)
        cost_s = self._ttft_cost_s(queue_s + prefill_s) + self._tpot_cost_s(
            itl_s + transfer_s / gaps
        )
        harm_s = 0.0
        if prefill is None:
            streams = sum(each.reqs for each in batches)
            harm_s, harm_cost_s = self._harm(decode, steps, work, itl_s, streams, gaps)
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
        self,
        decode: Candidate,
        steps: StepModel,
        work: PromptWork,
        before_s: float,
        streams: int,
        gaps: float,
    ) -> tuple[float, float]:
        """Return (total delay, cost) that a prompt on `decode` causes to the `streams` of its rank
        group. `before_s`: their step time without the prompt."""
        delay_s = steps.prompt_s(work.tokens, work.pairs)
        if queue := self._queues.get(decode.worker_id):
            # Queued prompts become streams, and already delay the running ones.
            streams += len(queue.prompts)
            before_s += steps.prompt_s(queue.tokens, queue.pairs) / gaps
        after_s = before_s + delay_s / gaps
        cost_s = streams * (self._tpot_cost_s(after_s) - self._tpot_cost_s(before_s))
        return streams * delay_s, cost_s

    def tier_worth(self, demand: Demand, worker: Candidate, cached: int, in_tiers: int) -> int:
        """Return the number of cached tokens that save as much time as loading `in_tiers` tokens
        from host memory. Return `in_tiers` while either time is unknown. The result is negative if
        loading is slower than computing.
        """
        steps = self.step_model(worker.worker_id)
        if worker.load is None or steps is None or not steps.knows_prefill:
            return in_tiers
        before = prompt_work(demand.prompt_tokens, cached)
        after = prompt_work(demand.prompt_tokens, cached + in_tiers)
        saved_s = steps.prompt_s(before.tokens - after.tokens, before.pairs - after.pairs)
        share = worker.load.tier_token_s * in_tiers / saved_s if saved_s > 0.0 else 0.0
        return max(-cached, round(in_tiers * (1.0 - share)))

    def fetch(
        self, demand: Demand, worker: Candidate, holder: Candidate, cached: int, held: int
    ) -> PrefixFetch | None:
        """Predict a copy from `holder`, which has `held` tokens of the prompt cached, to `worker`,
        which has `cached`. Return None while there are too few measurements.

        The holder computes one token, behind the prompts that wait there. Then the blocks move, and
        the worker computes one token, too.
        """
        steps = self.step_model(worker.worker_id)
        if steps is None or not (steps.knows_prefill and steps.knows_decode):
            return None
        at_holder = self._first_token_s(holder, prompt_work(held + 1, held), decode_batch(holder))
        if at_holder is None:
            return None
        before = prompt_work(demand.prompt_tokens, cached)
        after = prompt_work(demand.prompt_tokens, held)
        compute_s = steps.prompt_s(before.tokens - after.tokens, before.pairs - after.pairs)
        missing, level = held - cached, distance(holder.info.topology, worker.info.topology)
        transfer_s = self._line(demand.model, level).seconds(missing)
        copy_s = sum(at_holder) + transfer_s + steps.decode_step_s(Batch(1, held))
        worth = 0
        if is_clearly_cheaper(copy_s, compute_s):
            worth = round(missing * (1.0 - copy_s / compute_s))
        size = holder.info.block_size
        last_block = demand.block_hashes(size)[held // size - 1]
        return PrefixFetch(
            holder.worker_id, held, missing, last_block, copy_s, compute_s, transfer_s, worth
        )

    def fetched(self, model: str, worker_id: str, plan: PrefixFetch, took_s: float) -> None:
        """Record a copy to `worker_id` that ended or was given up after `took_s`."""
        ends = map(self._fleet.members.get, (plan.holder, worker_id))
        holder, worker = [{} if x is None else x.info.topology for x in ends]
        in_steps_s = plan.copy_s - plan.transfer_s
        line = self._line(model, distance(holder, worker))
        line.add(self._clock(), plan.missing, max(0.0, took_s - in_steps_s))

    def _line(self, model: str, level: str) -> _CopyTime:
        now, line = self._clock(), self._copies.get((model, level))
        if line is None or now - line.at > RELEARN_S:
            line = self._copies[model, level] = _CopyTime.assumed(now, FETCH_S + PRIOR_S[level])
        return line

    def has_capacity(self, demand: Demand, decode: Candidate) -> bool:
        """Return False if the predicted TPOT of `decode` with one more request exceeds
        `reject_factor × tpot_s`."""
        limit_s = self.slo.tpot_s * self.slo.reject_factor
        # An idle worker accepts any request, however strict the limit is.
        if not limit_s or demand.prefill_only or not decode.outstanding_requests:
            return True
        model = self.step_model(decode.worker_id)
        if model is None or not model.knows_decode:
            return True
        means, batch = self.means(demand.model), decode_batch(decode)
        context = batch.kv_tokens / batch.reqs if batch.reqs else demand.prompt_tokens
        # The other requests placed there wait for their prefill and do not decode yet.
        decoding = decode.outstanding_requests * (1.0 if means is None else means.decoding_share)
        alone_s = model.decode_step_s(Batch(1, round(context)))
        slope_s = model.decode_step_s(Batch(2, round(2 * context))) - alone_s
        others = [rank for rank in self._ranks_of(decode) if rank.worker_id != decode.worker_id]
        group_s = max((model.decode_step_s(decode_batch(rank)) for rank in others), default=0.0)
        return max(alone_s + decoding * slope_s, group_s) <= limit_s

    def placed(self, decision: Decision) -> tuple[Prediction | None, QueuedPrompt]:
        """Record a placement. Return its prediction and the prompt, to be passed to `computed`
        later."""
        placement, demand = decision.placement, decision.demand
        assert placement is not None, "the request was placed"
        decode, prefill = placement.decode, placement.prefill
        prediction = None
        if not demand.prefill_only:
            names = (None if prefill is None else prefill.worker_id, decode.worker_id)
            # A policy that compares costs has already predicted it.
            made = {(p.prefill, p.decode): p for p in decision.predictions}
            prediction = made.get(names) or self.predict(demand, prefill, decode, decision.cached)
        worker = prefill or decode
        prompt = QueuedPrompt(worker.worker_id, _work(demand, worker, decision.cached))
        queue = self._queues.get(prompt.worker_id)
        if queue is None:
            queue = self._queues[prompt.worker_id] = _PromptQueue(self._clock())
        queue.prompts[prompt] = None
        queue.change(prompt.work, 1)
        return prediction, prompt

    def computed(self, prompt: QueuedPrompt) -> None:
        """Record that a prompt was computed or given up. A second call does nothing."""
        queue = self._queues.get(prompt.worker_id)
        if queue is None or prompt not in queue.prompts:
            return
        if next(iter(queue.prompts)) is prompt:
            # The next prompt begins when the first one ends, not when it was placed.
            queue.head_since = self._clock()
        del queue.prompts[prompt]
        queue.change(prompt.work, -1)
        if not queue.prompts:
            del self._queues[prompt.worker_id]

    def encoded(self, model: str, tokens: int, seconds: float) -> None:
        """Record the encode time of `tokens` image tokens."""
        self._encodes[model].add(seconds / tokens)

    def encode_s(self, model: str, tokens: int) -> float | None:
        mean = self._encodes.get(model)
        return None if mean is None or mean.count < MIN_SAMPLES else tokens * mean.value

    def prefill_wait_s(self, demand: Demand, prefill: Candidate, cached: Cached) -> float | None:
        first = self._first_token_s(prefill, _work(demand, prefill, cached), _NO_BATCH)
        return None if first is None else first[0]

    def soonest_s(self, model: str, prompt_tokens: int, regions: Regions = None) -> float | None:
        """Predict the TTFT of a new prompt on the worker that would compute it first. Return None
        if no ready worker of the model in these regions is measured."""
        work = prompt_work(prompt_tokens)
        found = [
            self._first_token_s(c, work, decode_batch(c))
            for c in (m.snapshot() for m in self._fleet.of_model(model))
            if c.state is MemberState.READY
            and c.role in (Role.PREFILL, Role.AGGREGATED)
            and may_hold(regions, c.info.topology)
        ]
        return min((sum(x) for x in found if x is not None), default=None)

    def answered(
        self, model: str, usage: Usage, receipt: Receipt, *, ttft_s: float, e2e_s: float
    ) -> None:
        """Record a request that was answered at its first attempt. Times count from placement."""
        means = self._means[model]
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
            self._distances[model, distance(prefill, decode)].add(exposed_s)
            pair = (receipt.prefill_worker, receipt.decode_worker)
            # Move the pair to the end: the first one is then the least recently used.
            self._transfers[pair] = self._transfers.pop(pair, _Mean())
            self._transfers[pair].add(exposed_s)
            if len(self._transfers) > self._max_pairs:
                del self._transfers[next(iter(self._transfers))]

    def _first_token_s(
        self, worker: Candidate, work: PromptWork, running: Batch
    ) -> tuple[float, float] | None:
        """Return (wait behind the queued prompts, time from the end of the wait to the first
        token). An engine computes prompts in order, several in one step if they fit."""
        steps, queue = self.step_model(worker.worker_id), self._queues.get(worker.worker_id)
        alone_s = None if steps is None else steps.prefill_s(work, running)
        if steps is None or alone_s is None:
            return None
        if queue is None:
            group_s = self._group_s(worker, steps, work.tokens, running)
            return max(0.0, group_s - alone_s), alone_s
        # Predicted as one prompt and not summed: prompts that share a step share its fixed cost.
        ahead = PromptWork(queue.tokens + work.tokens, queue.pairs + work.pairs, work.end)
        head = next(iter(queue.prompts)).work
        together_s = steps.prefill_s(ahead, running)
        head_s = steps.prefill_s(PromptWork(head.tokens, head.pairs), running)
        if together_s is None or head_s is None:
            return None
        # The engine has worked on the first prompt since then, at most for its predicted time.
        done_s = min(self._clock() - queue.head_since, head_s)
        group_s = self._group_s(worker, steps, ahead.tokens, running)
        return max(0.0, max(together_s - done_s, group_s) - alone_s), alone_s

    def _group_s(self, worker: Candidate, steps: StepModel, tokens: int, running: Batch) -> float:
        """Return a lower bound of the time to compute `tokens` on `worker`, set by the prompts that
        the other ranks of its group compute in the same steps. 0 without a group."""
        count, longest_s = steps.steps_of(tokens), 0.0
        for rank in self._ranks_of(worker):
            queue = self._queues.get(rank.worker_id)
            if queue is not None and rank.worker_id != worker.worker_id:
                share = min(1.0, count * steps.chunk_tokens / queue.tokens)
                share = share if steps.chunk_tokens else 1.0
                prompts_s = steps.prompt_s(share * queue.tokens, share * queue.pairs)
                longest_s = max(longest_s, count * steps.decode_step_s(running) + prompts_s)
        return longest_s

    def _ranks_of(self, worker: Candidate) -> list[Candidate]:
        """Return the ranks of the worker's data-parallel group, or the worker alone. All ranks step
        in lockstep, as long as the slowest."""
        group = worker.info.group
        if not group:
            return [worker]
        members = self._fleet.of_model(worker.info.model.name)
        return [
            m.snapshot()
            for m in members
            if m.info.group == group
            and m.info.role is worker.role
            and m.state is not MemberState.LOST
        ] or [worker]

    def distance_s(self, model: str, prefill: Candidate, decode: Candidate) -> float:
        """Return the mean wait for KV between workers at this distance, or the prior before enough
        measurements. Return 0 if their labels show no distance."""
        level = distance(prefill.info.topology, decode.info.topology)
        mean = self._distances.get((model, level)) if level else None
        return mean.value if mean is not None and mean.count >= MIN_SAMPLES else PRIOR_S[level]

    def _transfer_s(self, model: str, prefill: Candidate, decode: Candidate) -> float:
        """Return the mean wait for KV between two workers; before enough measurements, the mean
        over all workers at this distance, or the prior."""
        level = distance(prefill.info.topology, decode.info.topology)
        pair = self._transfers.get((prefill.worker_id, decode.worker_id))
        for mean in (pair, self._distances.get((model, level))):
            if mean is not None and mean.count >= MIN_SAMPLES:
                return mean.value
        return PRIOR_S[level]

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


def _alike(one: float, other: float) -> bool:
    return max(one, other) <= (1.0 + ALIKE) * min(one, other) < math.inf


def is_clearly_cheaper(cost_s: float, other_s: float) -> bool:
    """Return True if `cost_s` is lower than `other_s` by the margins."""
    return cost_s < other_s * (1.0 - MARGIN) - EARLY * MARGIN_S


def _work(demand: Demand, worker: Candidate, cached: Cached) -> PromptWork:
    return prompt_work(demand.prompt_tokens, cached.get(worker.worker_id, 0))
