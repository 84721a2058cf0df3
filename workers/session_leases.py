"""Which cached blocks are under the lease of a session.

Between two turns of a session nothing runs that uses its blocks. An engine that evicts the least
recently used ones would soon give them to requests whose prompts never come back. A lease makes an
engine evict them last. It holds nothing: blocks under a lease count as free, so no request ever
waits for one, and a lease that is left over costs nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import WorkerLoad

# Why leases end.
REASONS = ("returned", "expired", "budget", "pressure")


class _TurnLease:
    """The blocks of one turn, the deepest (the last of its tokens) first."""

    __slots__ = ("blocks", "ends_at")

    def __init__(self, blocks: Sequence[int], ends_at: float) -> None:
        # A dict would take ever longer to find its first key while the first ones are removed.
        self.blocks: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)
        self.ends_at = ends_at

    @property
    def deepest(self) -> int:
        return next(iter(self.blocks))


class _LeasesByBlock:
    """Leases by a block of theirs."""

    def __init__(self) -> None:
        self._leases: dict[int, dict[_TurnLease, None]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def of(self, block: int) -> tuple[_TurnLease, ...]:
        return tuple(self._leases.get(block, ()))

    def add(self, block: int, lease: _TurnLease) -> None:
        self._leases.setdefault(block, {})[lease] = None

    def remove(self, block: int, lease: _TurnLease) -> bool:
        """Return True if that was the last one of `block`."""
        leases = self._leases[block]
        del leases[lease]
        if not leases:
            del self._leases[block]
        return not leases

    def pop(self, block: int) -> dict[_TurnLease, None]:
        return self._leases.pop(block, {})


class SessionLeases:
    """The leases of an engine, whose block keys are numbers. Whoever orders the blocks for eviction
    asks `block in leases`, and moves the blocks that a method returns: they are under no lease any
    more.

    At most `most_blocks` are under leases; the leases of the turns that ended first go first. A
    lease ends after `max_s`, or earlier if the next turn was expected earlier.
    """

    def __init__(self, most_blocks: int, max_s: float) -> None:
        self._most, self._max_s = most_blocks, max_s
        self._leases: dict[_TurnLease, None] = {}  # the oldest first
        # Sessions share prefixes: a block may be under thousands of leases, so nothing walks them.
        self._of_block = _LeasesByBlock()
        self._by_deepest = _LeasesByBlock()
        self._next_end = float("inf")  # not later than the first end
        self.ended = Counter(dict.fromkeys(REASONS, 0))

    def __contains__(self, block: int) -> bool:
        return block in self._of_block

    @property
    def blocks(self) -> int:
        """Number of blocks under leases. A block may be under several."""
        return len(self._of_block)

    def added_to(self, load: WorkerLoad) -> WorkerLoad:
        """Return `load` with the leases."""
        ended = {reason: count for reason, count in self.ended.items() if count}
        return replace(load, session_blocks=len(self._of_block), session_leases_ended=ended)

    def grant(self, blocks: Sequence[int], now: float, expected_s: float) -> list[int]:
        """Put the cached blocks of a turn that has ended, the deepest first, under a lease.
        `expected_s`: until the next turn; 0 if that is not known."""
        # Without its first blocks a prefix is worth nothing; without its last it is shorter.
        blocks = blocks[-self._most :] if self._most else ()
        if not blocks:
            return []
        lease = _TurnLease(blocks, now + min(expected_s or self._max_s, self._max_s))
        # The turn before this one, if its blocks were not used from the cache but computed again.
        former = [x for block in lease.blocks for x in self._by_deepest.of(block)]
        self._leases[lease] = None
        self._by_deepest.add(lease.deepest, lease)
        for block in lease.blocks:
            self._of_block.add(block, lease)
        self._next_end = min(self._next_end, lease.ends_at)
        released = [block for x in former for block in self._end(x, "returned")]
        while len(self._of_block) > self._most:
            released += self._end(next(iter(self._leases)), "budget")
        return released

    def touched(self, block: int) -> list[int]:
        """A request uses `block` from the cache. The lease of a turn ends when its deepest block is
        used: by the next turn, or by a copy of it to another worker."""
        over = self._by_deepest.of(block)
        return [freed for lease in over for freed in self._end(lease, "returned")]

    def taken(self, block: int) -> None:
        """The engine gave `block`, which was free, to other tokens: no other block was left."""
        deepest_of = self._by_deepest.pop(block)
        for lease in self._of_block.pop(block):
            del lease.blocks[block]
            if not lease.blocks:
                del self._leases[lease]
                self.ended["pressure"] += 1
            elif lease in deepest_of:
                self._by_deepest.add(lease.deepest, lease)

    def expire(self, now: float) -> list[int]:
        """End the leases whose time is over."""
        if now < self._next_end:
            return []
        over = [x for x in self._leases if x.ends_at <= now]
        released = [block for x in over for block in self._end(x, "expired")]
        self._next_end = min((x.ends_at for x in self._leases), default=float("inf"))
        return released

    def _end(self, lease: _TurnLease, reason: str) -> list[int]:
        del self._leases[lease]
        self.ended[reason] += 1
        self._by_deepest.remove(lease.deepest, lease)
        return [block for block in lease.blocks if self._of_block.remove(block, lease)]
