"""What a person sees while a comparison runs: a bar with the time left on a terminal, lines
elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from benchmarks.progress import Tally

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.compare.plan import Replay
    from benchmarks.compare.run import CompareSettings
    from benchmarks.records import Status
    from benchmarks.result import ReplayResult
    from benchmarks.targets import ServedModel
    from benchmarks.workload import Workload

# What a start, and the end of a replay after its last request, take; corrected as it goes on.
START_S: Final = 15.0
TAIL_S: Final = 2.0


def starts_s(settings: CompareSettings, arms: int) -> float:
    """About how long the starts take."""
    return arms * START_S * (settings.rounds + settings.probes if settings.restart else 1)


def replays_s(settings: CompareSettings, arms: int) -> float:
    """About how long the replays take, at most: a sweep may end sooner."""
    s = settings
    rounds = s.rounds * (s.requests / s.rate_per_s + TAIL_S)
    return arms * (rounds + s.probes * (s.probe_s + TAIL_S))


def replay_s(replay: Replay) -> float:
    """About how long one replay takes."""
    return replay.requests / replay.rate_per_s + TAIL_S


def left_text(seconds: float) -> str:
    """``3:05 left``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02} left"


class CompareProgress:
    """A context manager; the bar is gone when it ends. State: what is running, and since when."""

    def __init__(self, console: Console, settings: CompareSettings, arms: int) -> None:
        self._console = console
        self._total_s = starts_s(settings, arms) + replays_s(settings, arms)
        self._later_s = replays_s(settings, arms)
        self._step_s = starts_s(settings, arms)
        self._probes = settings.probes
        self._rounds = settings.rounds
        self._begun = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            # Drawing holds the interpreter; more often than this it would show in the lag.
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=self._total_s, detail="")
        self._what = "starting"
        self._tally = Tally()

    def __enter__(self) -> CompareProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def starting(self, name: str) -> None:
        """An arm is being started."""
        self._what = f"starting {name}"
        self._show()

    def started(self, name: str, ready_s: float | None) -> None:
        """Say how long it took."""
        if ready_s is not None:
            self._say(f"{name} is ready after {ready_s:.1f} s")

    def replaying(self, replay: Replay) -> None:
        """A replay begins."""
        self._what = self._name(replay)
        self._begun, self._step_s = time.monotonic(), replay_s(replay)
        if replay.kind != "warmup":
            self._later_s = max(0.0, self._later_s - self._step_s)
        self._tally = Tally()
        self._show()

    def replayed(self, replay: Replay, result: ReplayResult) -> None:
        """Say what came of it, where there is no bar to see it on."""
        if self._console.is_terminal:
            return
        ok = sum(record.status == "ok" for record in result.records)
        self._say(
            f"{self._name(replay)}: {ok} of {len(result.records)} at {replay.rate_per_s:.2f}/s; "
            f"{left_text(self._later_s)}"
        )

    def prepared(self, workload: Workload, model: ServedModel) -> None:
        """Nothing is shown of it."""

    def sent(self) -> None:
        """Count a request sent."""
        self._tally.sent += 1
        self._show()

    def finished(self, status: Status) -> None:
        """Count a request ended."""
        self._tally.end(status)
        self._show()

    def _name(self, replay: Replay) -> str:
        number = replay.number + 1
        if replay.kind == "warmup":
            return f"warming up {replay.arm}"
        if replay.kind == "probe":
            return f"probe {number} of {self._probes} at most, {replay.arm}"
        return f"round {number} of {self._rounds}, {replay.arm}"

    def _left_s(self) -> float:
        """What is left of this step, and all later ones."""
        elapsed = time.monotonic() - self._begun
        return self._later_s + max(0.0, self._step_s - elapsed)

    def _show(self) -> None:
        left_s = self._left_s()
        detail = f"{left_text(left_s)}, {self._tally}"
        done = max(0.0, self._total_s - left_s)
        self._bar.update(self._task, description=self._what, completed=done, detail=detail)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
