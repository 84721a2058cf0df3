"""What this router knows of its workers' costs, and the predictions that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.step_moments import StepMoments, pooled
from pdserve.types import Role
from router.admission import LatencyEstimate
from router.cost.accuracy import Accuracy, ratios
from router.cost.backlog import Backlog
from router.cost.gaps import context_of, takes_one_more
from router.cost.meter import Reading, Window, read
from router.cost.pace import pace_of
from router.cost.replay import Pool
from router.cost.stalls import Stalls
from router.cost.step_model import Batch, fit_steps, prompt_work
from router.cost.transfer_model import TransferModel
from router.fleet.member import MemberState
from router.placement.context import Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.cost.objective import Slo
    from router.cost.outcome import Outcome
    from router.cost.pace import Pace
    from router.cost.step_model import PromptWork, StepModel
    from router.fleet.pool import WorkerPool
    from router.placement.values import Candidate, Decision, Demand

# A model is fitted anew when its worker has reported since and this long has passed.
REFIT_S = 2.0
PRIOR_S = 5.0
READING_S = 5.0
PACE_S = 1.0
# Of so many requests, the last ones, the pace is said.
PACE_OUTCOMES = 64

# A model, and the size of a prompt in powers of two: habits are kept by it.
SizeClass = tuple[str, int]


@dataclass(slots=True)
class _Fitted:
    model: StepModel
    moments: StepMoments
    prior: StepMoments
    at: float


class CostBook:
    """The router's `CostModel`. State: the models fitted so far, the priors of each model name, the
    backlog, transfers, how far predictions were off, and which way requests of a size went last,
    and recent outcomes. `on_ratio` is told each predicted over actual, with its model and kind."""

    def __init__(
        self,
        pool: WorkerPool,
        slo: Slo,
        clock: Callable[[], float],
        *,
        on_ratio: Callable[[str, str, float], None] = lambda model, kind, ratio: None,
    ) -> None:
        self.slo = slo
        self.accuracy = Accuracy()
        self._on_ratio = on_ratio
        self.transfers = TransferModel()
        self.backlog = Backlog()
        self.stalls = Stalls()
        self._pool = pool
        self._clock = clock
        self._fitted: dict[str, _Fitted] = {}
        self._priors: dict[str, tuple[StepMoments, float]] = {}
        self._local: dict[SizeClass, bool] = {}
        self._windows: dict[str, Window] = {}
        self._readings: dict[str, tuple[Reading, float]] = {}
        self._paces: dict[str, tuple[Pace | None, float]] = {}

    def step_model(self, worker: str) -> StepModel | None:
        """What is known of a worker's steps; None of one that is not registered."""
        member = self._pool.members.get(worker)
        if member is None:
            self._fitted.pop(worker, None)
            self.stalls.forget(worker)
            return None
        now = self._clock()
        known = self._fitted.get(worker)
        if known is not None and now - known.at < REFIT_S:
            return known.model
        own = member.steps or StepMoments()
        prior = self._prior(member.info.model.name, now)
        if known is not None and known.moments is own and known.prior is prior:
            return known.model
        chunk = member.info.settings.get("max_num_batched_tokens", "")
        model = fit_steps(own, prior, chunk_tokens=int(chunk) if chunk.isdecimal() else 0)
        self._fitted[worker] = _Fitted(model, own, prior, now)
        return model

    def _prior(self, model: str, now: float) -> StepMoments:
        known = self._priors.get(model)
        if known is not None and known[0].prefill.steps and now - known[1] < PRIOR_S:
            return known[0]
        self._forget()
        found = pooled(m.steps for m in self._pool.of_model(model) if m.steps is not None)
        self._priors[model] = (found, now)
        return found

    def _forget(self) -> None:
        for worker in self._fitted.keys() - self._pool.members.keys():
            del self._fitted[worker]
            self.stalls.forget(worker)

    def predict(
        self,
        demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        cached: Mapping[str, int],
    ) -> Prediction | None:
        """None while too little was measured to say."""
        model = self.step_model(decode.worker_id)
        if model is None or not model.knows_decode:
            return None
        if prefill is None:
            return self._local_prediction(demand, decode, model, cached)
        return self._remote_prediction(demand, prefill, decode, model, cached)

    def _remote_prediction(
        self,
        demand: Demand,
        prefill: Candidate,
        decode: Candidate,
        decode_model: StepModel,
        cached: Mapping[str, int],
    ) -> Prediction | None:
        model = self.step_model(prefill.worker_id)
        if model is None:
            return None
        work = _work(demand, prefill, cached)
        pair = (prefill.worker_id, decode.worker_id)
        waits = self.backlog.first_token_s(
            prefill.worker_id, work, model, batch_of(prefill), self._clock()
        )
        transfer_s = self.transfers.exposed_s(demand.model, pair, demand.prompt_tokens)
        if waits is None or transfer_s is None:
            return None
        queue_s, prefill_s = waits
        itl_s = decode_model.decode_step_s(batch_of(decode))
        return Prediction(
            prefill.worker_id,
            decode.worker_id,
            queue_s + prefill_s,
            0.0,
            transfer_s,
            queue_s,
            itl_s,
            self.slo.first_cost_s(queue_s + prefill_s)
            + self.slo.gap_cost_s(itl_s + transfer_s / self.stalls.gaps(demand.model)),
            not self._is_local(demand),
        )

    def _local_prediction(
        self, demand: Demand, decode: Candidate, model: StepModel, cached: Mapping[str, int]
    ) -> Prediction | None:
        work = _work(demand, decode, cached)
        beside = batch_of(decode)
        if beside.reqs >= decode.info.max_num_seqs:
            return None  # it would wait for a seat, nobody knows how long
        waits = self.backlog.first_token_s(decode.worker_id, work, model, beside, self._clock())
        if waits is None:
            return None
        queue_s, prefill_s = waits
        itl_s = model.decode_step_s(beside)
        held_s = model.prompt_s(work)
        # Their mean gap, with what holds them up already, and with this prompt too.
        gaps = self.stalls.gaps(demand.model)
        before_s = itl_s + self._held_s(decode.worker_id, gaps * itl_s) / gaps
        held = beside.reqs + self.backlog.waiting(decode.worker_id)
        coming = self._come_within(held_s, demand.model, decode.outstanding_requests - held)
        harm_s = (
            held * self.slo.gap_cost_s(before_s + held_s / gaps)
            + coming * self.slo.gap_cost_s(before_s + held_s / 2 / gaps)
            - (held + coming) * self.slo.gap_cost_s(before_s)
        )
        return Prediction(
            None,
            decode.worker_id,
            queue_s + prefill_s,
            (held + coming / 2) * held_s,
            0.0,
            queue_s,
            itl_s,
            self.slo.first_cost_s(queue_s + prefill_s)
            + self.slo.gap_cost_s(itl_s)
            + harm_s
            + self.slo.seat_cost_s(decode.outstanding_requests * held_s, decode.taken),
            self._is_local(demand),
        )

    def _come_within(self, seconds: float, model: str, elsewhere: int) -> float:
        """Of requests of a decode worker whose prompts are computed elsewhere now, those that come
        while it is held up: about as many as prompts are computed in that time. They meet half of
        it in the mean."""
        pace = self.pace(model)
        each_s = seconds if pace is None else pace.prefill_s
        return min(max(0.0, elsewhere), seconds / each_s) if each_s > 0 else 0.0

    def _held_s(self, worker: str, life_s: float) -> float:
        return self.stalls.held_s(worker, life_s, self._clock())

    def _is_local(self, demand: Demand) -> bool:
        return self._local.get(_size_class(demand), False)

    def decided(self, decision: Decision) -> Prediction | None:
        """What was predicted of the decision. From now on requests of this size go this way until
        the other is better by a margin, if there was a choice."""
        placement, demand = decision.placement, decision.demand
        if placement is None or demand.prefill_only:
            return None
        ways = {prediction.prefill is None for prediction in decision.predictions}
        if len(ways) == 2:
            self._local[_size_class(demand)] = placement.prefill is None
        if placement.prefill is None and placement.decode.role is Role.DECODE:
            self._holds_up(demand, placement.decode, decision.cached)
        for prediction in decision.predictions:
            prefill = None if placement.prefill is None else placement.prefill.worker_id
            if (prediction.prefill, prediction.decode) == (prefill, placement.decode.worker_id):
                return prediction
        return self.predict(demand, placement.prefill, placement.decode, decision.cached)

    def _holds_up(self, demand: Demand, decode: Candidate, cached: Mapping[str, int]) -> None:
        model = self.step_model(decode.worker_id)
        if model is not None:
            life_s = self.stalls.gaps(demand.model) * model.decode_step_s(batch_of(decode))
            held_s = model.prompt_s(_work(demand, decode, cached))
            self.stalls.add(decode.worker_id, held_s, life_s, self._clock())

    def enter(self, worker: str, prompt_tokens: int, cached: int) -> Callable[[], None]:
        """A prompt was placed on `worker`; call what is returned when it is computed or given
        up."""
        ticket = self.backlog.enter(worker, prompt_work(prompt_tokens, cached), self._clock())
        return lambda: self.backlog.leave(ticket, self._clock())

    def answered(self, prediction: Prediction | None, outcome: Outcome) -> None:
        """A request ended well, at its first attempt."""
        model = outcome.model
        self._windows.setdefault(model, Window()).add(outcome)
        self.stalls.answered(model, max(0, outcome.output_tokens - 1))
        if outcome.exposed_transfer_s is not None:
            pair = (outcome.prefill_worker, outcome.decode_worker)
            self.transfers.observe(model, pair, outcome.prompt_tokens, outcome.exposed_transfer_s)
        if prediction is not None:
            for kind, ratio in ratios(prediction, outcome):
                self.accuracy.add(model, kind, ratio)
                self._on_ratio(model, kind, ratio)

    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Return the times that recent requests of the model took, for a prompt of this length."""
        pace = self.pace(model)
        if pace is None:
            return None
        prefill_s = pace.prefill_s * prompt_tokens / max(1.0, pace.prompt_tokens)
        decode_s = pace.decode_s * min(1.0, max_tokens / self.stalls.gaps(model))
        return LatencyEstimate(max(0.0, pace.first_s - pace.prefill_s), prefill_s, decode_s)

    def reading(self, model: str) -> Reading:
        """Whether prefill apart helps `model` now; as old as READING_S at most."""
        now = self._clock()
        known = self._readings.get(model)
        if known is not None and now - known[1] < READING_S:
            return known[0]
        recent = self._windows.get(model, Window()).recent(now)
        found = read(
            recent, self._pool_of(model, Role.PREFILL), self._pool_of(model, Role.DECODE), self.slo
        )
        self._readings[model] = (found, now)
        return found

    def takes_one_more(self, demand: Demand, decode: Candidate) -> bool:
        """Whether a worker's tokens stay within the SLO's `most_gap_s` of each other with another
        request that decodes there; so too where that is not known, or there is no such limit."""
        if not self.slo.most_gap_s or demand.prefill_only:
            return True
        model = self.step_model(decode.worker_id)
        if model is None or not model.knows_decode:
            return True
        context = context_of(decode, demand.prompt_tokens)
        share = self._decoding_share(demand.model)
        return takes_one_more(model, decode, context, share, self.slo.most_gap_s)

    def _decoding_share(self, model: str) -> float:
        """Of a request's time on a decode worker, the part in which it decodes."""
        pace = self.pace(model)
        return 1.0 if pace is None else pace.decoding_share

    def pace(self, model: str) -> Pace | None:
        """What the last requests of `model` took of each phase, as old as PACE_S at most; None of
        too few."""
        now = self._clock()
        known = self._paces.get(model)
        if known is not None and now - known[1] < PACE_S:
            return known[0]
        window = self._windows.get(model)
        pace = None if window is None else pace_of(window.recent(now)[-PACE_OUTCOMES:])
        self._paces[model] = pace, now
        return pace

    def _pool_of(self, model: str, role: Role) -> Pool | None:
        """The ready workers of a role as one: the model of the first that is known."""
        ready = [
            m
            for m in self._pool.of_model(model)
            if m.info.role is role and m.state is MemberState.READY
        ]
        models = [x for m in ready if (x := self.step_model(m.worker_id)) is not None]
        return Pool(models[0], len(ready)) if models else None


def batch_of(candidate: Candidate) -> Batch:
    """What a worker decodes now: as it said last, or as far as this router knows."""
    load, info = candidate.load, candidate.info
    if load is None:
        return Batch(
            candidate.outstanding_requests if candidate.role is not Role.PREFILL else 0,
            candidate.reserved_blocks * info.block_size,
        )
    if candidate.role is Role.PREFILL:
        return Batch()
    used = max(0, info.total_blocks - load.free_blocks)
    return Batch(load.num_running_reqs, used * info.block_size)


def _size_class(demand: Demand) -> SizeClass:
    return demand.model, demand.prompt_tokens.bit_length()


def _work(demand: Demand, worker: Candidate, cached: Mapping[str, int]) -> PromptWork:
    return prompt_work(demand.prompt_tokens, cached.get(worker.worker_id, 0))
