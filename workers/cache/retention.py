"""Retention of cached blocks between two turns of a session. Between turns no request uses a
session's blocks, so an engine that evicts the least recently used blocks would soon give them to
requests whose prompts never recur. An engine evicts retained blocks last. Retention reserves
nothing: retained blocks count as free, so no request waits for one, and retaining a turn in vain
costs nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import WorkerLoad

# Reasons for the end of a turn's retention.
REASONS = ("returned", "expired", "budget", "pressure")


class _Turn:
    """The blocks of one turn, deepest (last tokens) first."""

    __slots__ = ("blocks", "ends_at")

    def __init__(self, blocks: Sequence[int], ends_at: float) -> None:
        # Not a dict, which finds its first key ever slower while first keys are removed.
        self.blocks: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        self.ends_at = ends_at

    @property
    def deepest(self) -> int:
        return next(iter(self.blocks))


class _TurnsByBlock:
    """Retained turns by block."""

    def __init__(self) -> None:
        self._turns: dict[int, dict[_Turn, None]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._turns

    def __len__(self) -> int:
        return len(self._turns)

    def of(self, block: int) -> tuple[_Turn, ...]:
        return tuple(self._turns.get(block, ()))

    def add(self, block: int, turn: _Turn) -> None:
        self._turns.setdefault(block, {})[turn] = None

    def remove(self, block: int, turn: _Turn) -> bool:
        """Remove a turn. Return True if it was the last one of `block`."""
        turns = self._turns[block]
        del turns[turn]
        if not turns:
            del self._turns[block]
        return not turns

    def pop(self, block: int) -> dict[_Turn, None]:
        return self._turns.pop(block, {})


class RetainedBlocks:
    """The retained turns of an engine. Blocks are identified by numbers. The evictor checks `block
    in retained`. Methods return blocks that are no longer retained; the caller re-queues them.

    At most `most_blocks` are retained: the oldest turns are dropped first. A turn is retained for
    `max_s`, or until the next turn is expected if that is earlier.
    """

    def __init__(self, most_blocks: int, max_s: float) -> None:
        self._most, self._max_s = most_blocks, max_s
        self._turns: dict[_Turn, None] = {}  # the oldest first
        # Sessions share prefixes, so a block may belong to thousands of turns. Nothing iterates
        # them.
        self._of_block = _TurnsByBlock()
        self._by_deepest = _TurnsByBlock()
        self._next_end = float("inf")  # lower bound of the first end
        self.ended = Counter(dict.fromkeys(REASONS, 0))

    def __contains__(self, block: int) -> bool:
        return block in self._of_block

    @property
    def blocks(self) -> int:
        """Number of retained blocks. A block may belong to several turns."""
        return len(self._of_block)

    def added_to(self, load: WorkerLoad) -> WorkerLoad:
        """Return `load` with the numbers of retained blocks and ended turns."""
        ended = {reason: count for reason, count in self.ended.items() if count}
        return replace(load, session_blocks=len(self._of_block), retentions_ended=ended)

    def retain(self, blocks: Sequence[int], now: float, expected_s: float) -> list[int]:
        """Retain the cached blocks of a turn that has ended, the deepest first. `expected_s`:
        seconds until the next turn; 0 if unknown."""
        # A prefix is useless without its first blocks, and shorter without its last ones.
        blocks = blocks[-self._most :] if self._most else ()
        if not blocks:
            return []
        turn = _Turn(blocks, now + min(expected_s or self._max_s, self._max_s))
        # The previous turn, if its blocks were not used from the cache but computed again.
        former = [x for block in turn.blocks for x in self._by_deepest.of(block)]
        self._turns[turn] = None
        self._by_deepest.add(turn.deepest, turn)
        for block in turn.blocks:
            self._of_block.add(block, turn)
        self._next_end = min(self._next_end, turn.ends_at)
        released = [block for x in former for block in self._end(x, "returned")]
        while len(self._of_block) > self._most:
            released += self._end(next(iter(self._turns)), "budget")
        return released

    def used(self, block: int) -> list[int]:
        """Record that a request uses `block` from the cache. Retention of a turn ends when its
        deepest block is used: by the next turn, or by a copy to another worker."""
        over = self._by_deepest.of(block)
        return [freed for turn in over for freed in self._end(turn, "returned")]

    def evicted(self, block: int) -> None:
        """Record that the engine evicted `block`, because all its free blocks were retained."""
        deepest_of = self._by_deepest.pop(block)
        for turn in self._of_block.pop(block):
            del turn.blocks[block]
            if not turn.blocks:
                del self._turns[turn]
                self.ended["pressure"] += 1
            elif turn in deepest_of:
                self._by_deepest.add(turn.deepest, turn)

    def expire(self, now: float) -> list[int]:
        """End retention of expired turns."""
        if now < self._next_end:
            return []
        over = [x for x in self._turns if x.ends_at <= now]
        released = [block for x in over for block in self._end(x, "expired")]
        self._next_end = min((x.ends_at for x in self._turns), default=float("inf"))
        return released

    def _end(self, turn: _Turn, reason: str) -> list[int]:
        del self._turns[turn]
        self.ended[reason] += 1
        self._by_deepest.remove(turn.deepest, turn)
        return [block for block in turn.blocks if self._of_block.remove(block, turn)]
