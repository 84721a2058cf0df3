"""The parts of the world in which the two machines meet: a link that keeps order, a request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer import source_actions as src
from kv_transfer import target as tgt
from kv_transfer.messages import Grant, Message

Job = src.PushChunk["SimLink"] | src.SendDone["SimLink"]
Content = tuple[str, int]


@dataclass(eq=False)
class SimLink:
    """What the kernel and the two links' threads hold."""

    to_source: deque[Message] = field(default_factory=deque)
    to_target: deque[Message] = field(default_factory=deque)
    jobs: deque[Job] = field(default_factory=deque)
    urgent: deque[Message] = field(default_factory=deque)
    busy: src.PushChunk[SimLink] | None = None
    source_up: bool = True
    target_up: bool = True
    sealed: bool = False
    damages: int = 0  # of the next copies, so many come damaged


class Engine(Enum):
    """Where a request stands in its engine."""

    NEW = "new"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """One transfer as the two engines see it."""

    tid: str
    tokens: int
    first_block: int
    source_blocks: list[int]
    target_blocks: list[int]
    block_size: int  # of the target's
    prefill: Engine = Engine.NEW
    ready: int = 0
    held: bool = False
    released: int = 0
    link: SimLink | None = None
    started: bool = False
    unneeded: bool = False
    copied: int = 0
    outdated: src.PushChunk[SimLink] | None = None  # a copy that the source will not count
    outcomes: list[tgt.TargetOutcome] = field(default_factory=list)

    @property
    def grant(self) -> Grant:
        blocks = self.target_blocks
        return Grant(self.tid, self.first_block, self.tokens, blocks, block_size=self.block_size)
