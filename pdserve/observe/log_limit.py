"""Rate limit for each log statement, so that repeated failures cannot fill the disk."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BURST = 50
PER_S = 5.0


class LogLimit(logging.Filter):
    """Limits each log statement to BURST lines at once, then PER_S lines per second (a token
    bucket). The next line that passes gives the number of omitted lines. State, by (file, line):
    tokens, time of the last update, omitted lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        tokens, since, left_out = self._places.get(place, (BURST, now, 0))
        tokens = min(BURST, tokens + PER_S * (now - since))
        if tokens < 1:
            self._places[place] = tokens, now, left_out + 1
            return False
        self._places[place] = tokens - 1, now, 0
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} lines like this were left out)"
            record.args = ()
        return True
