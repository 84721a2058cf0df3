"""How long decode waits for KV after prefill has ended, for each pair of workers. Times in seconds.

Most of a transfer passes beside the prefill; what shows is a part of the last chunk and what the
two workers have to say to each other: base + rate · tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from router.cost.least_squares import fit

# Transfers, the pair's own or of other pairs of the model, before anything is said.
MIN_TRANSFERS = 5.0
_REMEMBERED = 64.0
_OUTLIER_RATIO = 4.0
_PRIOR_TRANSFERS = 8.0
_TOKENS = 1e3

Pair = tuple[str, str]


@dataclass(slots=True)
class Line:
    """Decayed sums of y over x, from which y = a + b·x follows. No single value counts for more
    than a few times what was expected of it."""

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        if self.n >= MIN_TRANSFERS:
            y = min(y, _OUTLIER_RATIO * max(self.at(x), self.y / self.n))
        kept = 1.0 - 1.0 / _REMEMBERED
        self.n = self.n * kept + 1.0
        self.x = self.x * kept + x
        self.xx = self.xx * kept + x * x
        self.y = self.y * kept + y
        self.xy = self.xy * kept + x * y

    def plus(self, other: Line, weight: float) -> Line:
        """With the other's sums, as `weight` values."""
        f = weight / other.n if other.n > weight else 1.0
        return Line(
            self.n + f * other.n,
            self.x + f * other.x,
            self.xx + f * other.xx,
            self.y + f * other.y,
            self.xy + f * other.xy,
        )

    def at(self, x: float) -> float:
        base, rate = fit(((self.n, self.x), (self.x, self.xx)), (self.y, self.xy))
        return base + rate * x


class TransferModel:
    """State: a line a pair, the latest `max_pairs`, and one a model over all of its pairs."""

    def __init__(self, *, max_pairs: int = 4096) -> None:
        self._max_pairs = max_pairs
        self._pairs: OrderedDict[Pair, Line] = OrderedDict()
        self._models: dict[str, Line] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def observe(self, model: str, pair: Pair, tokens: int, exposed_s: float) -> None:
        """KV of `tokens` tokens of a prompt arrived `exposed_s` after its prefill had ended."""
        for line in (self._line(pair), self._models.setdefault(model, Line())):
            line.add(tokens / _TOKENS, exposed_s)

    def exposed_s(self, model: str, pair: Pair, tokens: int) -> float | None:
        """None until enough transfers were seen."""
        own, prior = self._pairs.get(pair), self._models.get(model)
        if prior is None or prior.n < MIN_TRANSFERS:
            return None
        lacking = _PRIOR_TRANSFERS - (0.0 if own is None else own.n)
        line = own or Line()
        return (line.plus(prior, lacking) if lacking > 0 else line).at(tokens / _TOKENS)

    def _line(self, pair: Pair) -> Line:
        line = self._pairs.get(pair)
        if line is None:
            line = self._pairs[pair] = Line()
            if len(self._pairs) > self._max_pairs:
                self._pairs.popitem(last=False)
        else:
            self._pairs.move_to_end(pair)
        return line
