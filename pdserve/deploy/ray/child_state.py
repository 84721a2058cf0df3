"""What is known of the child process of a Ray actor, across its restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.deploy.local.restarts import Restarts, death_reason

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True)
class ChildState:
    """`facts`: its addresses while it is ready. `doing` and `failure`: as it reports them. `lives`:
    its starts. `broken`: why it ended before it was first ready; "" if it has not ended, None once
    it was ready."""

    log: Path
    restarts: Restarts
    facts: dict[str, Any] = field(default_factory=dict)
    doing: str = "starting"
    failure: str = ""
    lives: int = 0
    broken: str | None = ""

    @property
    def is_ready(self) -> bool:
        return bool(self.facts)

    @property
    def is_crash_looping(self) -> bool:
        return self.restarts.is_crash_looping and not self.facts

    def start(self) -> None:
        self.lives += 1
        self.doing = "starting"

    def report(self, report: dict[str, Any], *, warm: bool) -> None:
        """Take a report of the process (`pdserve/process/child.py`)."""
        self.doing = report.get("doing", self.doing)
        self.failure = report.get("failed", self.failure)
        if "ready" in report:
            self.facts, self.failure, self.broken = report["ready"], "", None
            self.take_requests(warm=warm)

    def take_requests(self, *, warm: bool) -> None:
        self.doing = "loaded, takes no requests" if warm else "serving"

    def begin_anew(self) -> None:
        self.facts, self.doing = {}, "restarting"

    def died(self, code: int, ran_s: float) -> float:
        """Count a death. Return the pause before the restart in seconds."""
        pause_s = self.restarts.died(ran_s, death_reason(code, self.failure, self.log))
        state = f"exit code {code}"
        if self.is_crash_looping:
            state = f"crash-looping, {self.restarts.reason}"
        self.doing = f"{state}; restarted in {pause_s:g} s"
        if self.broken == "":
            self.broken = self.failure or f"exit code {code}, see {self.log}"
        return pause_s

    def row(self) -> dict[str, Any]:
        """Return the part of the status that this knows."""
        return {
            "ready": self.is_ready,
            "doing": self.doing,
            "failure": self.failure,
            "broken": self.broken or "",
            "crash_loop": self.restarts.reason if self.is_crash_looping else "",
            "lives": self.lives,
            "log": str(self.log),
            **self.facts,
        }
