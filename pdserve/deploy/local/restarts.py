"""Processes across their restarts: the back-off, and reasons of their deaths."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.process.forkserver import Process

FIRST_PAUSE_S = 1.0
FORGIVEN_AFTER_S = 300.0  # a process that ran this long starts with no deaths counted
_CRASH_LOOP = 2  # number of deaths, each after less than FORGIVEN_AFTER_S
_MAX_DOUBLINGS = 16
_TAIL_BYTES = 65536
_MAX_REASON = 500  # characters
# A line below level error, as pdserve (time first) and vLLM (process first) write it.
_NOT_AN_ERROR = re.compile(r"(\([^)]*\) )?([\d-]+ [\d:,]+ )?(DEBUG|INFO|WARNING) ")
_LONGEST_END = 10  # lines


@dataclass(slots=True)
class Restarts:
    """The recent deaths of one process. It is restarted without limit, after a pause that doubles
    with each death up to `longest_pause_s`."""

    longest_pause_s: float
    deaths: int = 0
    reason: str = ""  # of the last death

    def died(self, ran_s: float, reason: str) -> float:
        """Count a death after `ran_s` seconds. Return the pause before the restart in seconds."""
        self.deaths = 1 if ran_s >= FORGIVEN_AFTER_S else self.deaths + 1
        self.reason = reason
        doublings = min(self.deaths - 1, _MAX_DOUBLINGS)
        return min(self.longest_pause_s, FIRST_PAUSE_S * 2.0**doublings)

    @property
    def is_crash_looping(self) -> bool:
        return self.deaths >= _CRASH_LOOP


@dataclass(slots=True)
class SupervisedProcess:
    """A router or a worker across its restarts. `process` is None while no process runs. `facts`
    are its addresses, which are known once it has been ready. A child that is not `wanted` must
    end before `leaves_by`. A `warm` worker has loaded its model and takes no requests.
    `begins_anew`: restarting with a changed configuration."""

    name: str
    log: Path
    restarts: Restarts
    process: Process | None = None
    pid: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    known: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    leaves_by: float = 0.0
    warm: bool = False
    begins_anew: bool = False
    ready_at: float | None = None
    failure: str = ""
    reports: int = 0

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is alive."""
        with contextlib.suppress(ProcessLookupError):
            if self.process is not None:
                self.process.send_signal(number)

    def begin_anew(self) -> None:
        """End the process, so that it starts with its present configuration."""
        self.begins_anew = True
        self.send(signal.SIGTERM)

    def died(self, code: int) -> float:
        """Count a death. Return the pause before the restart in seconds."""
        served_s = 0.0 if self.ready_at is None else time.monotonic() - self.ready_at
        return self.restarts.died(served_s, death_reason(code, self.failure, self.log))

    @property
    def is_crash_looping(self) -> bool:
        return self.restarts.is_crash_looping and (self.process is None or self.ready_at is None)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log that are neither empty nor below level error, or its
    last lines if there are none of these. Return an empty list if the file does not exist."""
    return _errors(_end_of(log))[-count:]


def error_of(text: str) -> str:
    """Return the line of a log that states why its process ended, or "" if the log is empty. A hint
    follows an error of a command, which begins with `pdserve:`."""
    lines = _errors(text)
    errors = [line for line in lines[-_LONGEST_END:] if line.startswith("pdserve:")]
    return (errors or lines or [""])[-1]


def _errors(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    return [line for line in lines if not _NOT_AN_ERROR.match(line)] or lines


def _end_of(log: Path) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace")


def death_reason(code: int, failure: str, log: Path) -> str:
    """Return why a process died: its reported `failure`, the signal, or the error in its log.
    `code` is the exit code, or the negative signal number."""
    if not failure and code < 0:
        failure = f"killed by signal {-code}"
        if -code in list(signal.Signals):
            failure += f" ({signal.Signals(-code).name})"
    elif not failure:
        failure = ": ".join(filter(None, (f"exit code {code}", error_of(_end_of(log)))))
    return failure[:_MAX_REASON]
