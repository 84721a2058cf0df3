"""How many workers a load needs: a guess by arithmetic, then simulations around it.

A large service is searched for in small, a whole number of times smaller in users or rate and in
workers, and then simulated once more as it is: a small pool evens out less, so the plan rather has
a worker too many.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError
from benchmarks.simulation.arrivals import Arrival, Arrivals
from benchmarks.simulation.capacity import Lengths, Saturation, prefill_s, saturation
from benchmarks.simulation.run import Setup, simulate, simulate_users
from benchmarks.simulation.service import RouterSettings, Workers
from benchmarks.simulation.users import Users
from pdserve.types import Role
from router.cost.step_model import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.simulation.service_model import ServiceModel
    from benchmarks.simulation.summary import Summary

# Workers of the small service in which is searched, about.
SEARCHED: Final = 12
_GROWTH: Final = 0.15
_MOST_TRIALS: Final = 30
_UTILISATION: Final = 0.8
_LEAST_REQUESTS: Final = 600
_SECONDS_AN_HOUR: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is planned for: `users` who think for `think_s` between an answer and the next question,
    or `rate_per_s` requests at random times. A share of `target` is to keep both SLOs. Prices are
    of a worker's hour."""

    model: ServiceModel
    settings: RouterSettings
    lengths: Lengths
    users: int = 0
    think_s: float = 0.0
    rate_per_s: float = 0.0
    target: float = 0.99
    prefill_price: float = 1.0
    decode_price: float = 1.0
    seed: int = 0

    def smaller(self, factor: int) -> Question:
        """As many times less is asked."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {"users": -(-self.users // factor), "rate_per_s": self.rate_per_s / factor}
        return Question(**values)


@dataclass(frozen=True, slots=True)
class Answer:
    """The fewest workers found that keep the SLOs, with what was simulated of them. `trials` is how
    many simulations it took."""

    workers: Workers
    summary: Summary
    cost_per_hour: float
    output_tokens_per_s: float
    tokens_per_s: float
    trials: int

    @property
    def per_million_output(self) -> float:
        return self.cost_per_hour / (self.output_tokens_per_s * _SECONDS_AN_HOUR) * 1e6

    @property
    def per_million(self) -> float:
        return self.cost_per_hour / (self.tokens_per_s * _SECONDS_AN_HOUR) * 1e6

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "workers": asdict(self.workers),
            "cost_per_hour": self.cost_per_hour,
            "cost_per_million_output_tokens": self.per_million_output,
            "cost_per_million_tokens": self.per_million,
            "simulations": self.trials,
            "simulated": self.summary.plain(),
        }


@dataclass(slots=True)
class Search:
    """State: the workers tried so far, with what they did."""

    question: Question
    tell: Callable[[str], None]
    tried: dict[Workers, Summary] = field(default_factory=dict)

    def try_out(self, workers: Workers) -> Summary:
        """Simulated once."""
        known = self.tried.get(workers)
        if known is None:
            if len(self.tried) >= _MOST_TRIALS:
                raise BenchError(f"no plan was found in {_MOST_TRIALS} simulations")
            known = self.tried[workers] = _simulate(self.question, workers)
            self.tell(f"{workers}: {known.attainment:.1%} within both SLOs")
        return known

    def meets(self, workers: Workers) -> bool:
        return self.try_out(workers).attainment >= self.question.target

    def grow(self, workers: Workers, share: float = _GROWTH) -> Workers:
        """More of what is short, until it does."""
        while not self.meets(workers):
            workers = self._more(workers, share)
        return workers

    def _more(self, workers: Workers, share: float) -> Workers:
        if workers.aggregated:
            return Workers(aggregated=_grown(workers.aggregated, share))
        if _lacks_prefill(self.tried[workers]):
            return Workers(_grown(workers.prefill, share), workers.decode)
        return Workers(workers.prefill, _grown(workers.decode, share))

    def shrink(self, workers: Workers) -> Workers:
        """Fewer of each kind in turn, as long as it does."""
        if workers.aggregated:
            return _least(lambda n: Workers(aggregated=n), workers.aggregated, self.meets)
        workers = _least(lambda n: Workers(workers.prefill, n), workers.decode, self.meets)
        kept = workers.decode
        return _least(lambda n: Workers(n, kept), workers.prefill, self.meets)


def _grown(count: int, share: float) -> int:
    return count + max(1, round(share * count))


def _least(made: Callable[[int], Workers], most: int, meets: Callable[[Workers], bool]) -> Workers:
    """The smallest number that does, of those up to `most`, which does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(made(middle)) else (middle, high)
    return made(high)


def _lacks_prefill(summary: Summary) -> bool:
    """Whether first tokens are the ones that are late: of answers that were given at all."""
    if summary.ttft is None or summary.tpot is None:
        return True
    late = summary.ttft.p99 / summary.slo_ttft_s, summary.tpot.p99 / summary.slo_tpot_s
    waits_for_room = summary.admission is not None and summary.admission.p90 > 0.01
    use = summary.pools.get(Role.DECODE.value)
    full = use is not None and waits_for_room and use.busy_share > _UTILISATION
    return late[0] >= late[1] and not (full and _prefill_is_idle(summary))


def _prefill_is_idle(summary: Summary) -> bool:
    use = summary.pools.get(Role.PREFILL.value)
    return use is not None and use.busy_share < _UTILISATION


def first_guess(question: Question) -> tuple[Workers, Workers, Saturation]:
    """By arithmetic: apart, together, and what one worker can do."""
    model, slo = question.model, question.settings.config.slo
    prefill, decode = model.engine(Role.PREFILL), model.engine(Role.DECODE)
    found = saturation(prefill, decode, question.lengths, slo.tpot_s)
    rate = question.rate_per_s
    if question.users:
        answer_s = 1 / found.prefill_per_s + found.step_s * question.lengths.output
        rate = question.users / (question.think_s + answer_s)
    apart = Workers(
        math.ceil(rate / (_UTILISATION * found.prefill_per_s)),
        math.ceil(rate / (_UTILISATION * found.decode_per_s)),
    )
    together = Workers(aggregated=math.ceil(rate / (_UTILISATION * found.aggregated_per_s)))
    return apart, together, found


def check_possible(question: Question) -> None:
    """Raises BenchError where requests alone in the service would not keep the SLOs."""
    model, slo = question.model, question.settings.config.slo
    prefill, decode = model.engine(Role.PREFILL), model.engine(Role.DECODE)
    alone_s = decode.steps.decode_step_s(Batch(1, round(question.lengths.held)))
    firsts = [model.overhead_s + prefill_s(prefill, x) for x, _ in question.lengths.pairs]
    kept = sum(first_s <= slo.ttft_s for first_s in firsts) / len(firsts)
    if kept < question.target:
        raise BenchError(
            f"alone in the service {kept:.1%} of the prompts have their first token in "
            f"{slo.ttft_s:g} s: more workers do not help"
        )
    if alone_s > slo.tpot_s:
        raise BenchError(
            f"a request that decodes alone has a token every {alone_s:.3f} s, later than "
            f"{slo.tpot_s:g} s: more workers do not help"
        )


def plan(question: Question, guess: Workers, tell: Callable[[str], None]) -> Answer:
    """The fewest workers of that kind. Raises BenchError where none are found."""
    check_possible(question)
    size = sum(guess.by_role.values())
    factor = max(1, size // SEARCHED)
    search = Search(question.smaller(factor), tell)
    small = Workers(*(-(-count // factor) for count in guess.by_role.values()))
    workers = search.shrink(search.grow(small))
    trials = len(search.tried)
    if factor > 1:
        whole = Search(question, tell)
        workers = whole.grow(Workers(*(factor * x for x in workers.by_role.values())), 0.03)
        summary, trials = whole.tried[workers], trials + len(whole.tried)
    else:
        summary = search.tried[workers]
    return _answer(question, workers, summary, trials)


def _answer(question: Question, workers: Workers, summary: Summary, trials: int) -> Answer:
    prefills, others = workers.prefill, workers.decode + workers.aggregated
    cost = prefills * question.prefill_price + others * question.decode_price
    lengths, output = question.lengths, summary.output_tokens_per_s
    per_s = output * (1 + lengths.prompt / lengths.output)
    return Answer(workers, summary, cost, output, per_s, trials)


def _simulate(question: Question, workers: Workers) -> Summary:
    setup = Setup(question.model, workers, question.settings)
    pairs = tuple(question.lengths.pairs)
    slo = question.settings.config.slo
    answer_s = slo.ttft_s + slo.tpot_s * question.lengths.output
    if question.users:
        cycle_s = question.think_s + answer_s
        turns = math.ceil(_LEAST_REQUESTS / question.users)
        users = Users(
            question.users, question.think_s, cycle_s, cycle_s * max(1, turns), pairs, question.seed
        )
        return simulate_users(setup, users).summary
    duration_s = max(4 * answer_s, _LEAST_REQUESTS / question.rate_per_s)
    return simulate(setup, _poisson(question, duration_s)).summary


def _poisson(question: Question, duration_s: float) -> Arrivals:
    draw, at_s = random.Random(f"plan {question.seed}"), 0.0
    found: list[Arrival] = []
    pairs = question.lengths.pairs
    while not found or at_s < duration_s:
        at_s += draw.expovariate(question.rate_per_s)
        found.append(Arrival(at_s, *pairs[len(found) % len(pairs)]))
    return Arrivals(tuple(found), 0, ())
