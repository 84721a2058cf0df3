"""How fast the queue drains: what deadlines and Retry-After are predicted from."""

from __future__ import annotations

from collections import deque
from typing import Protocol

# Predictions come from so many of the last grants and first tokens.
WINDOW = 128
# With fewer than this nothing is predicted, and nothing refused for its deadline.
LEAST_SAMPLES = 8


class DrainPredictor(Protocol):
    """Predictions for one model at a time; None where nothing is known. Times are on one clock."""

    def prefill_s(self, model: str, prompt_tokens: int) -> float | None:
        """From a request's grant to its first token."""
        ...

    def wait_s(self, model: str, work_tokens: float, now: float) -> float | None:
        """Until so much waiting work has been granted."""
        ...

    def turn_s(self, model: str, now: float) -> float | None:
        """Between two grants while requests wait."""
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


class _Rates:
    """What one model's queue was seen to do. Grants are told apart by busy time, in which requests
    waited: how fast they go when nobody waits says nothing of how fast they could."""

    def __init__(self) -> None:
        self.grants: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.prefills: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.work_tokens = 0
        self.prompt_tokens = 0
        self.prefill_s = 0.0
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
    """Rates as they were measured of late: grants while requests waited, and seconds a prompt token
    from grant to first token."""

    def __init__(self) -> None:
        self._models: dict[str, _Rates] = {}

    def _rates(self, model: str) -> _Rates:
        rates = self._models.get(model)
        if rates is None:
            rates = self._models[model] = _Rates()
        return rates

    def prefill_s(self, model: str, prompt_tokens: int) -> float | None:
        rates = self._rates(model)
        if len(rates.prefills) < LEAST_SAMPLES:
            return None
        return prompt_tokens * rates.prefill_s / max(1, rates.prompt_tokens)

    def wait_s(self, model: str, work_tokens: float, now: float) -> float | None:
        rates = self._rates(model)
        window_s = rates.window_s(now)
        if window_s is None:
            return None
        return work_tokens * window_s / max(1, rates.work_tokens - rates.grants[0][1])

    def turn_s(self, model: str, now: float) -> float | None:
        rates = self._rates(model)
        window_s = rates.window_s(now)
        return None if window_s is None else window_s / (len(rates.grants) - 1)

    def waits(self, model: str, waiting: bool, now: float) -> None:
        self._rates(model).waits(waiting, now)

    def granted(self, model: str, work_tokens: int, now: float) -> None:
        rates = self._rates(model)
        if len(rates.grants) == WINDOW:
            rates.work_tokens -= rates.grants[0][1]
        rates.grants.append((rates.busy_s(now), work_tokens))
        rates.work_tokens += work_tokens

    def prefilled(self, model: str, prompt_tokens: int, seconds: float) -> None:
        rates = self._rates(model)
        if len(rates.prefills) == WINDOW:
            tokens, taken_s = rates.prefills[0]
            rates.prompt_tokens -= tokens
            rates.prefill_s -= taken_s
        rates.prefills.append((prompt_tokens, seconds))
        rates.prompt_tokens += prompt_tokens
        rates.prefill_s += seconds
