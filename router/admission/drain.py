"""How fast the queue drains: what deadlines and Retry-After are predicted from."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from router.cost.least_squares import fit

# Predictions come from so many of the last grants and answers.
WINDOW = 128
# With fewer than this nothing is predicted, and nothing refused for its deadline.
LEAST_SAMPLES = 8
# Few prefills take longer than so many standard deviations beyond the line through the last ones.
# With one, a tenth of what an overloaded pool let in had its first token just after the limit.
DEVIATIONS = 2.0


class DrainPredictor(Protocol):
    """Predictions for one model at a time; None where nothing is known. Times are on one clock."""

    def prefill_s(self, model: str, prompt_tokens: int) -> float | None:
        """From a request's grant to its first token, which few exceed."""
        ...

    def prompt_s(self, model: str, prompt_tokens: int) -> float:
        """Of that, what grows with the prompt."""
        ...

    def answer_s(self, model: str, max_tokens: int) -> float | None:
        """From the first token of an answer of at most so many to its last."""
        ...

    def wait_s(self, model: str, work_tokens: float, now: float) -> float | None:
        """Until so much waiting work has been granted."""
        ...

    def turn_s(self, model: str, now: float) -> float | None:
        """Between two grants while requests wait, by one standard deviation rather too long."""
        ...

    def waits(self, model: str, waiting: bool, now: float) -> None:
        """Requests of the model wait from now on, or none does."""
        ...

    def granted(self, model: str, work_tokens: int, now: float) -> None:
        """A request that had waited was granted."""
        ...

    def prefilled(self, model: str, prompt_tokens: int, seconds: float) -> None:
        """A first token came so long after its request's grant."""
        ...

    def answered(self, model: str, tokens: int, seconds: float) -> None:
        """An answer ended, of so many tokens, so long after its first one."""
        ...


class _Prefills:
    """Seconds from grant to first token by tokens of the prompt: a base and a rate, least squares
    over the last ones, and by how much those differed from it. What they share is the base: a
    prompt waits in its engine's queue, however short it is."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._tokens = self._squares = 0
        self._seconds = self._products = self._seconds_squared = 0.0
        self._line: tuple[float, float] | None = None

    def add(self, tokens: int, seconds: float) -> None:
        if len(self._last) == WINDOW:
            self._count(*self._last[0], -1)
        self._last.append((tokens, seconds))
        self._count(tokens, seconds, 1)
        self._line = None

    def _count(self, tokens: int, seconds: float, sign: int) -> None:
        self._tokens += sign * tokens
        self._squares += sign * tokens * tokens
        self._seconds += sign * seconds
        self._products += sign * tokens * seconds
        self._seconds_squared += sign * seconds * seconds

    def line(self) -> tuple[float, float] | None:
        """Base and rate; None of too few."""
        count = len(self._last)
        if self._line is None and count >= LEAST_SAMPLES:
            self._line = self._fitted(count)
        return self._line

    def _fitted(self, count: int) -> tuple[float, float]:
        """The base with DEVIATIONS standard deviations on top of it."""
        matrix = ((count, self._tokens), (self._tokens, self._squares))
        base, rate = fit(matrix, (self._seconds, self._products))
        explained = 2 * (base * self._seconds + rate * self._products)
        power = count * base**2 + 2 * base * rate * self._tokens + rate**2 * self._squares
        variance = (self._seconds_squared - explained + power) / count
        return base + DEVIATIONS * math.sqrt(max(0.0, variance)), rate


class _Answers:
    """Tokens of an answer, and seconds between them, on average over the last ones."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._tokens = 0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if len(self._last) == WINDOW:
            old_tokens, old_s = self._last[0]
            self._tokens -= old_tokens
            self._seconds -= old_s
        self._last.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds

    def predict_s(self, max_tokens: int) -> float | None:
        count = len(self._last)
        if count < LEAST_SAMPLES:
            return None
        tokens = min(max_tokens, self._tokens / count)
        gap_s = max(0.0, self._seconds) / max(1, self._tokens - count)
        return max(0.0, tokens - 1.0) * gap_s


class _Rates:
    """What one model's queue was seen to do. Grants are told apart by busy time, in which requests
    waited: how fast they go when nobody waits says nothing of how fast they could."""

    def __init__(self) -> None:
        self.grants: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.prefills = _Prefills()
        self.answers = _Answers()
        self.work_tokens = 0
        self._busy_s = 0.0
        self._since: float | None = None

    def busy_s(self, now: float) -> float:
        return self._busy_s + (0.0 if self._since is None else max(0.0, now - self._since))

    def waits(self, waiting: bool, now: float) -> None:
        if waiting and self._since is None:
            self._since = now
        elif not waiting:
            self._busy_s = self.busy_s(now)
            self._since = None

    def window_s(self, now: float) -> float | None:
        """Busy seconds that the grants of the window took."""
        if len(self.grants) < LEAST_SAMPLES:
            return None
        return max(self.busy_s(now) - self.grants[0][0], 1e-6)


class MeasuredDrain:
    """Rates as they were measured of late: grants while requests waited, first tokens after their
    grants, and answers after their first tokens."""

    def __init__(self) -> None:
        self._models: dict[str, _Rates] = {}

    def _rates(self, model: str) -> _Rates:
        rates = self._models.get(model)
        if rates is None:
            rates = self._models[model] = _Rates()
        return rates

    def prefill_s(self, model: str, prompt_tokens: int) -> float | None:
        line = self._rates(model).prefills.line()
        return None if line is None else line[0] + prompt_tokens * line[1]

    def prompt_s(self, model: str, prompt_tokens: int) -> float:
        line = self._rates(model).prefills.line()
        return 0.0 if line is None else prompt_tokens * line[1]

    def answer_s(self, model: str, max_tokens: int) -> float | None:
        return self._rates(model).answers.predict_s(max_tokens)

    def wait_s(self, model: str, work_tokens: float, now: float) -> float | None:
        rates = self._rates(model)
        window_s = rates.window_s(now)
        if window_s is None:
            return None
        return work_tokens * window_s / max(1, rates.work_tokens - rates.grants[0][1])

    def turn_s(self, model: str, now: float) -> float | None:
        rates = self._rates(model)
        window_s = rates.window_s(now)
        if window_s is None:
            return None
        turns = len(rates.grants) - 1
        return window_s / turns * (1.0 + 1.0 / math.sqrt(turns))

    def waits(self, model: str, waiting: bool, now: float) -> None:
        self._rates(model).waits(waiting, now)

    def granted(self, model: str, work_tokens: int, now: float) -> None:
        rates = self._rates(model)
        if len(rates.grants) == WINDOW:
            rates.work_tokens -= rates.grants[0][1]
        rates.grants.append((rates.busy_s(now), work_tokens))
        rates.work_tokens += work_tokens

    def prefilled(self, model: str, prompt_tokens: int, seconds: float) -> None:
        self._rates(model).prefills.add(prompt_tokens, seconds)

    def answered(self, model: str, tokens: int, seconds: float) -> None:
        self._rates(model).answers.add(tokens, seconds)
