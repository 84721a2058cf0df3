"""The index against a naive account of the same events."""

from __future__ import annotations

import sys
from random import Random

import pytest

from pdserve import prefix_hash
from router.placement.values import Demand
from router.prefix.index import Holder, PrefixIndex
from router.prefix.lookup import MAX_PROMPTS, MAX_TOKENS, IndexLookup

SIZE = 1
ROOT = prefix_hash.root("m", SIZE)
WORKERS = [f"w{i}" for i in range(12)]


def chain(prompt: str) -> list[int]:
    return prefix_hash.chain([int(digit) for digit in prompt], SIZE, ROOT)


def beginnings(prompt: str) -> list[str]:
    return [prompt[: i + 1] for i in range(len(prompt))]


def matched(index: PrefixIndex, prompt: str) -> dict[str, int]:
    return index.lengths(chain(prompt))


def naive(held: dict[str, set[str]], prompt: str) -> dict[str, int]:
    depths = {
        name: max((len(x) for x in beginnings(prompt) if x in blocks), default=0)
        for name, blocks in held.items()
    }
    return {name: depth for name, depth in depths.items() if depth}


class Pair:
    """An index and the naive account, told the same."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.holders: dict[str, Holder] = {}
        self.held: dict[str, set[str]] = {}

    def store(self, name: str, prompt: str) -> None:
        if name not in self.holders:
            self.holders[name], self.held[name] = self.index.join(name), set()
        new = [x for x in beginnings(prompt) if x not in self.held[name]]
        self.index.apply(self.holders[name], [], [chain(x)[-1] for x in new])
        if not self.holders[name].truncated:
            self.held[name].update(new)

    def evict(self, name: str, prompt: str) -> None:
        """A block and all behind it, in one update."""
        gone = {x for x in self.held.get(name, ()) if x.startswith(prompt)}
        if gone:
            self.held[name] -= gone
            self.index.apply(self.holders[name], [chain(x)[-1] for x in gone], [])

    def leave(self, name: str) -> None:
        if name in self.holders:
            del self.held[name]
            self.index.leave(self.holders.pop(name))


def some_prompt(rng: Random) -> str:
    return "".join(rng.choices("01", k=rng.randint(1, 7)))


@pytest.mark.parametrize("seed", range(60))
def test_a_lookup_finds_what_a_naive_one_finds(seed: int) -> None:
    rng, pair = Random(seed), Pair(PrefixIndex(10_000))
    for _ in range(60):
        name, prompt = rng.choice(WORKERS), some_prompt(rng)
        match rng.choice(("store", "store", "store", "evict", "leave", "purge")):
            case "store":
                pair.store(name, prompt)
            case "evict":
                pair.evict(name, prompt)
            case "leave":
                pair.leave(name)
            case "purge":
                pair.index.purge()
        for asked in (prompt, some_prompt(rng)):
            assert matched(pair.index, asked) == naive(pair.held, asked)
    purged(pair.index)
    assert pair.index.blocks == len(set().union(*pair.held.values()))
    for name in list(pair.holders):
        pair.leave(name)
    purged(pair.index)
    assert (pair.index.blocks, pair.index.distinct_sets) == (0, 0)


def purged(index: PrefixIndex) -> None:
    while index.needs_purge:
        index.purge()


@pytest.mark.parametrize("max_sets", [4, 1000])
@pytest.mark.parametrize("seed", range(20))
def test_a_full_index_says_too_little_and_never_too_much(seed: int, max_sets: int) -> None:
    rng, index = Random(seed), PrefixIndex(6, max_sets=max_sets)
    pair = Pair(index)
    truth: dict[str, set[str]] = {}
    for _ in range(40):
        name, prompt = rng.choice(WORKERS[:4]), some_prompt(rng)
        if rng.random() < 0.5:
            pair.store(name, prompt)
            truth.setdefault(name, set()).update(beginnings(prompt))
        else:
            gone = {x for x in truth.get(name, ()) if x.startswith(prompt)}
            if gone:
                truth[name] -= gone
                index.apply(pair.holders[name], [chain(x)[-1] for x in gone], [])
        assert index.blocks <= 6
        found, real = matched(index, prompt), naive(truth, prompt)
        for worker, depth in found.items():
            assert depth <= real[worker]
        for worker, depth in real.items():
            assert found.get(worker, 0) == depth or pair.holders[worker].truncated
    truncated = [h for h in pair.holders.values() if h.truncated]
    assert index.truncated_workers == len(truncated) > 0
    assert index.refused_blocks > 0


def test_what_was_refused_is_taken_when_the_worker_is_read_anew() -> None:
    index = PrefixIndex(4)
    first, second = index.join("w0"), index.join("w1")
    index.apply(first, [], chain("0000"))
    index.apply(second, [], chain("0011"))
    assert matched(index, "00110") == {"w0": 2, "w1": 2}
    assert (second.truncated, first.truncated) == (True, False)
    assert (index.refused_blocks, index.truncated_workers, index.has_room) == (2, 1, False)
    index.apply(first, chain("0000")[2:], [])
    # There is room, but what came before is missing in between.
    index.apply(second, [], chain("00110")[4:])
    assert matched(index, "00110") == {"w0": 2, "w1": 2}
    index.leave(second)
    again = index.join("w1")
    index.apply(again, [], chain("0011"))
    assert matched(index, "00110") == {"w0": 2, "w1": 4}
    assert index.truncated_workers == 0
    purged(index)
    assert index.blocks == 4


def test_a_slot_is_used_again_only_after_its_blocks_are_gone() -> None:
    index = PrefixIndex(1000)
    for i in range(300):
        holder = index.join(f"w{i}")
        index.apply(holder, [], chain(f"{i:b}"))
        index.leave(holder)
        purged(index)
    assert index.blocks == 0
    assert index.join("last").slot == 0


def test_workers_of_different_block_sizes_and_models_are_told_apart() -> None:
    index = PrefixIndex(1000)
    lookup = IndexLookup(index)
    token_ids = tuple(range(33))
    for name, model, size, blocks in (
        ("small", "m", 4, 8),
        ("large", "m", 16, 2),
        ("half", "m", 16, 1),
        ("other", "n", 4, 8),
    ):
        lookup.joined(model, size)
        hashes = prefix_hash.chain(token_ids, size, prefix_hash.root(model, size))
        index.apply(index.join(name), [], hashes[:blocks])

    def cached(tokens: tuple[int, ...], model: str = "m") -> dict[str, int]:
        demand = Demand(model, len(tokens), len(tokens) + 1, token_ids=tokens)
        return dict(lookup.cached_tokens(demand))

    assert cached(token_ids) == {"small": 32, "large": 32, "half": 16}
    # The last token is computed in any case, and with it its block.
    assert cached(token_ids[:32]) == {"small": 28, "large": 16, "half": 16}
    assert cached(token_ids, "n") == {"other": 32}
    assert cached(token_ids, "unknown") == {}
    assert cached((99, *token_ids)) == {}
    assert cached(token_ids[:3]) == {}
    lookup.left("m", 4)
    assert cached(token_ids) == {"large": 32, "half": 16}


@pytest.mark.parametrize("tokens", [1, MAX_TOKENS // 8, MAX_TOKENS + 1])
def test_prompts_that_were_asked_for_are_not_all_kept(tokens: int) -> None:
    lookup = IndexLookup(PrefixIndex(1000))
    lookup.joined("m", 1024)
    prompts = [(i,) * tokens for i in range(MAX_PROMPTS + 1 if tokens == 1 else 9)]
    unasked = [sys.getrefcount(prompts[i]) for i in range(len(prompts))]
    for i in range(len(prompts)):
        lookup.cached_tokens(Demand("m", tokens, tokens + 1, token_ids=prompts[i]))
    kept = [i for i, before in enumerate(unasked) if sys.getrefcount(prompts[i]) > before]
    # The latest, as many as may be, and one in any case.
    count = max(1, min(MAX_PROMPTS, MAX_TOKENS // tokens))
    assert kept == list(range(len(prompts)))[-count:]
