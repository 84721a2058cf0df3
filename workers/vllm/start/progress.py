"""Progress of an engine start, from vLLM's log: downloads, weights, compilation, graph capture."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LONGEST = 120


class _Lines(logging.Handler):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(record.getMessage().partition("\n")[0][:_LONGEST])


@contextlib.contextmanager
def reported(report: Callable[[str], None]) -> Iterator[None]:
    """Report the first line of each INFO message in this context, on the thread that logs it.
    vLLM's own handler keeps its level, so the log does not grow."""
    logger, lines = logging.getLogger("vllm"), _Lines(report)
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(min(level, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(lines)
