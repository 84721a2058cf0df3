"""One stream of an answer on one worker, as the handoff (router/handoff.py) keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.types import PhaseReport, Role


class LegKind(StrEnum):
    """What a leg's worker was asked to do; WHOLE is both phases."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


@dataclass(slots=True, eq=False)
class Leg:
    """One stream on one worker; `open` until its last delta, its loss, or its cancellation. `holds`
    from a prefill's last delta, or that of what was exported, until decode's first: its blocks wait
    to be taken. `source` is the worker that had decoded before, where its KV is taken over."""

    kind: LegKind
    worker_id: str
    role: Role
    open: bool = True
    report: PhaseReport | None = None
    holds: bool = False
    spoke: bool = False  # a token of it came
    source: str = ""
