"""Prints what the prefix index costs the router:

    python -m benchmarks.placement.prefix [--blocks 10000000] [--workers 1000] [--json]

The index is filled as workers would: each holds prompts of its own, and all of them the same system
prompt. Then lookups are timed one by one (the prompt's hashes beside them, they are made once a
request), with prompts drawn at random, so that the tables are cold; then changes, in batches of one
update; then what it takes to forget a worker. Times are of this thread's CPU: what else the
machine does would make all of a p99.

Without the extension router/prefix/_table.c the table is dicts, and all of it slower.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from array import array
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from pdserve import prefix_hash
from router.placement.values import Demand
from router.prefix.index import PrefixIndex
from router.prefix.lookup import IndexLookup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.prefix.index import Holder

MODEL, BLOCK_SIZE = "m", 16
PROMPT_BLOCKS = 125
LONG_BLOCKS = 2048
SYSTEM_BLOCKS = 64
BATCH = 64
# Of a snapshot, in one update (workers/cache_feed.py).
PART = 1 << 12


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure and its spread; `p99` is None where there is but one value."""

    what: str
    p50: float
    p99: float | None
    unit: str


class Filled:
    """An index of `workers` with `blocks` between them, and the prompts that it was filled with."""

    def __init__(self, blocks: int, workers: int) -> None:
        self.rng = np.random.default_rng(1)
        before = _rss()
        start = time.perf_counter()
        self.index = PrefixIndex(blocks + 10_000_000)
        self.lookup = IndexLookup(self.index)
        self.lookup.joined(MODEL, BLOCK_SIZE)
        self.system = self.hashes(SYSTEM_BLOCKS)
        self.prompts: list[array[int]] = []
        self.holders: list[Holder] = []
        each = max(1, (blocks - SYSTEM_BLOCKS) // workers // PROMPT_BLOCKS)
        for worker in range(workers):
            holder = self.index.join(f"worker-{worker}")
            self.holders.append(holder)
            self.index.apply(holder, (), self.system)
            for number in range(each):
                prompt = self.hashes(PROMPT_BLOCKS)
                self.index.apply(holder, (), prompt)
                if number < 4:
                    self.prompts.append(prompt)
        self.fill_s = time.perf_counter() - start
        gc.collect()
        self.bytes_per_block = (_rss() - before) / self.index.blocks

    def hashes(self, count: int) -> array[int]:
        """Random ones: the index cannot tell them from those of tokens."""
        return array("Q", self.rng.integers(0, 1 << 60, count).tobytes())

    def some_prompt(self) -> array[int]:
        return self.prompts[int(self.rng.integers(len(self.prompts)))]

    def held_by_one(self, blocks: int) -> array[int]:
        """A beginning that one worker has."""
        which = int(self.rng.integers(len(self.holders)))
        beginning = self.hashes(blocks)
        self.index.apply(self.holders[which], (), beginning)
        return beginning

    def conversation(self) -> array[int]:
        """The system prompt, which all workers have, and what one of them has behind it."""
        return self.system + self.held_by_one(40) + self.hashes(21)

    def staircase(self, steps: int) -> array[int]:
        """A prompt of which each of so many workers has another length."""
        prompt = self.hashes(PROMPT_BLOCKS)
        for step, which in enumerate(self.rng.permutation(len(self.holders))[:steps].tolist()):
            length = (step + 1) * PROMPT_BLOCKS // steps
            self.index.apply(self.holders[which], (), prompt[:length])
        return prompt


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def _spread(what: str, samples: list[float], unit: str = "µs") -> Measured:
    p50, p99 = np.percentile(samples, (50, 99))
    return Measured(what, float(p50), float(p99), unit)


def _each(what: str, chains: Sequence[array[int]], run: Callable[[array[int]], object]) -> Measured:
    samples = []
    for chain in chains:
        start = time.thread_time_ns()
        run(chain)
        samples.append((time.thread_time_ns() - start) / 1e3)
    return _spread(what, samples)


def lookups(filled: Filled, n: int) -> list[Measured]:
    """Of prompts of 125 blocks (2,000 tokens) and of 2,048, by what is cached of them."""
    steps, half = min(50, len(filled.holders)), LONG_BLOCKS // 2
    cases = {
        "lookup: nothing cached": [filled.hashes(PROMPT_BLOCKS) for _ in range(n)],
        "lookup: all of it on one worker": [filled.some_prompt() for _ in range(n)],
        "lookup: half on all workers, more on one": [filled.conversation() for _ in range(n)],
        f"lookup: {steps} lengths on {steps} workers": [
            filled.staircase(steps) for _ in range(n // 20)
        ],
        "lookup: 2,048 blocks, nothing cached": [
            filled.hashes(LONG_BLOCKS) for _ in range(n // 20)
        ],
        "lookup: 2,048 blocks, half on one worker": [
            filled.held_by_one(half) + filled.hashes(half) for _ in range(n // 20)
        ],
        "lookup: 2,048 blocks, all on one worker": [
            filled.held_by_one(LONG_BLOCKS) for _ in range(n // 20)
        ],
    }
    return [
        _each(what, chains, lambda c: filled.index.lengths(c, BLOCK_SIZE))
        for what, chains in cases.items()
    ]


def hashing() -> list[Measured]:
    """The whole question, hashes included, of a prompt seen for the first time."""
    rng, found = np.random.default_rng(2), []
    for tokens in (2000, 32_768):
        ids = [tuple(rng.integers(0, 128_000, tokens).tolist()) for _ in range(50)]
        lookup = IndexLookup(PrefixIndex(1))
        lookup.joined(MODEL, BLOCK_SIZE)
        samples = []
        for token_ids in ids:
            demand = Demand(MODEL, tokens, tokens + 1, token_ids=token_ids)
            start = time.thread_time_ns()
            lookup.cached_tokens(demand)
            samples.append((time.thread_time_ns() - start) / 1e3)
        found.append(_spread(f"hashes of {tokens:,} tokens, once a request", samples))
    return found


def changes(filled: Filled, n: int) -> list[Measured]:
    """Updates of 64 blocks stored and as many removed, as a busy worker sends them."""
    rates = []
    live = {holder.slot: array("Q") for holder in filled.holders}
    for which in filled.rng.integers(len(filled.holders), size=n).tolist():
        holder = filled.holders[which]
        stored = prefix_hash.pack(filled.hashes(BATCH))
        removed = prefix_hash.pack(live[holder.slot])
        start = time.thread_time_ns()
        gone, new = prefix_hash.words(removed), prefix_hash.words(stored)
        filled.index.apply(holder, gone, new)
        rates.append((time.thread_time_ns() - start) / 1e3 / (len(gone) + len(new)))
        live[holder.slot] = new
    shared = []
    for _ in range(20):
        prompt = filled.hashes(BATCH)
        for holder in filled.holders[:50]:
            start = time.thread_time_ns()
            filled.index.apply(holder, (), prompt)
            shared.append((time.thread_time_ns() - start) / 1e3 / BATCH)
    parts = []
    for which in filled.rng.integers(len(filled.holders), size=20).tolist():
        part = filled.hashes(PART)
        start = time.thread_time_ns()
        filled.index.apply(filled.holders[which], (), part)
        parts.append((time.thread_time_ns() - start) / 1e3)
    return [
        _spread("one block stored or removed", rates),
        _spread("one block stored that others hold", shared),
        _spread("4,096 blocks of a snapshot, at once", parts),
    ]


def forgetting(filled: Filled) -> list[Measured]:
    """A worker leaves: at once for lookups, in steps for memory."""
    index = filled.index
    start = time.thread_time_ns()
    index.leave(filled.holders.pop())
    at_once = (time.thread_time_ns() - start) / 1e3
    steps = []
    while index.needs_purge:
        start = time.thread_time_ns()
        index.purge()
        steps.append((time.thread_time_ns() - start) / 1e3)
    return [
        Measured("a worker that leaves, for lookups", at_once, None, "µs"),
        _spread("a step of the clean-up behind it", steps),
    ]


def measure(blocks: int, workers: int, samples: int) -> list[Measured]:
    """All of it, on one filled index."""
    filled = Filled(blocks, workers)
    gc.collect()
    held = filled.index.blocks
    return [
        Measured("blocks", held, None, ""),
        Measured("workers", workers, None, ""),
        Measured("memory", filled.bytes_per_block, None, "bytes a block"),
        Measured("filling it", held / filled.fill_s, None, "blocks/s"),
        *lookups(filled, samples),
        *hashing(),
        *changes(filled, samples // 4),
        *forgetting(filled),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement.prefix")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="default: 10 million")
    parser.add_argument("--workers", type=int, default=1000, help="default: 1000")
    parser.add_argument("--samples", type=int, default=4000, help="of a lookup; default: 4000")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    options = parser.parse_args(arguments)
    rows = measure(options.blocks, options.workers, options.samples)
    if options.json:
        sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n")
        return 0
    table = Table(title="The prefix index")
    table.add_column("what", no_wrap=True)
    for name in ("p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        p99 = "" if row.p99 is None else f"{row.p99:,.1f}"
        table.add_row(row.what, f"{row.p50:,.1f}", p99, row.unit)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
