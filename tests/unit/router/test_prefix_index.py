"""The prefix index against a naive account of the same events."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.model import prefix_hash
from router.fleet.prefix_watch import Holder, PrefixIndex
from router.placement.values import Demand

ROOT = prefix_hash.root("m", 1)
WORKERS = [f"w{i}" for i in range(12)]


def chain(prompt: str) -> list[int]:
    return prefix_hash.chain([int(digit) for digit in prompt], 1, ROOT)


def beginnings(prompt: str) -> list[str]:
    return [prompt[: i + 1] for i in range(len(prompt))]


def naive(held: dict[str, set[str]], prompt: str) -> dict[str, int]:
    found = {}
    for worker, blocks in held.items():
        depth = [x in blocks for x in (*beginnings(prompt), "end")].index(False)
        if depth:
            found[worker] = depth
    return found


def purge(index: PrefixIndex) -> None:
    while index.needs_purge:
        for _ in index.purge():
            pass


def some_prompt(rng: Random) -> str:
    return "".join(rng.choices("01", k=rng.randint(1, 7)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_blocks", [6, 10_000])
def test_lookups_find_what_workers_hold_and_never_more(seed: int, max_blocks: int) -> None:
    rng, index = Random(seed), PrefixIndex(max_blocks)
    holders: dict[str, Holder] = {}
    held: dict[str, set[str]] = {}
    was_full = False
    for _ in range(60):
        name, prompt = rng.choice(WORKERS), some_prompt(rng)
        match rng.choice(("store", "store", "store", "evict", "leave", "purge")):
            case "store":
                if name not in holders:
                    holders[name], held[name] = index.join(name), set()
                index.apply(holders[name], [], chain(prompt))
                held[name].update(beginnings(prompt))
            case "evict" if name in holders:
                gone = {x for x in held[name] if x.startswith(prompt)}
                index.apply(holders[name], [chain(x)[-1] for x in gone], [])
                held[name] -= gone
            case "leave" if name in holders:
                index.leave(holders.pop(name))
                del held[name]
            case "purge":
                next(index.purge(), None)
        assert len(index) <= max_blocks
        was_full |= len(index) == max_blocks
        for asked in (prompt, some_prompt(rng)):
            found, real = index.cached_blocks(chain(asked)), naive(held, asked)
            for worker in found.keys() | real.keys():
                depth = found.get(worker, 0)
                assert depth <= real.get(worker, 0)
                assert depth == real.get(worker, 0) or was_full
    for holder in holders.values():
        index.leave(holder)
    purge(index)
    assert len(index) == 0


def test_a_full_index_takes_no_more_blocks_until_some_are_gone() -> None:
    index = PrefixIndex(4)
    first, second = index.join("w0"), index.join("w1")
    index.apply(first, [], chain("0000"))
    index.apply(second, [], chain("0011"))
    assert index.cached_blocks(chain("00110")) == {"w0": 2, "w1": 2}
    index.apply(first, chain("0000")[2:], [])
    index.apply(second, [], chain("0011"))
    assert index.cached_blocks(chain("00110")) == {"w0": 2, "w1": 4}


def test_blocks_in_host_memory_are_reached_after_those_in_the_cache() -> None:
    index = PrefixIndex(1000)
    first, second = index.join("w0"), index.join("w1")
    assert index.blocks_with_tiers(chain("0000")) == {}
    index.apply(first, [], chain("00"))
    index.apply(first, [], chain("00001")[1:], in_tiers=True)
    index.apply(second, [], chain("0000")[1:], in_tiers=True)
    assert index.cached_blocks(chain("00001")) == {"w0": 2}
    assert index.blocks_with_tiers(chain("00001")) == {"w0": 5}
    index.apply(first, chain("0000")[3:], [], in_tiers=True)
    index.apply(second, [], chain("0"), in_tiers=True)
    assert index.blocks_with_tiers(chain("00001")) == {"w0": 3, "w1": 4}
    index.leave(second)
    purge(index)
    assert index.blocks_with_tiers(chain("00001")) == {"w0": 3}


def test_bits_of_departed_workers_are_used_again() -> None:
    index = PrefixIndex(1000)
    for i in range(300):
        holder = index.join(f"w{i}")
        index.apply(holder, [], chain(f"{i:b}"))
        index.leave(holder)
        purge(index)
    assert len(index) == 0
    assert index.join("last").bit == 1


def test_block_hashes_cover_what_an_engine_can_take_from_its_cache() -> None:
    demand = Demand("m", 33, 34, token_ids=tuple(range(33)))
    assert demand.block_hashes(16) is demand.block_hashes(16)
    root = prefix_hash.root("m", 16)
    assert demand.block_hashes(16) == prefix_hash.chain(range(32), 16, root)
    # An engine always computes the last token, and with it the last token's block.
    assert len(Demand("m", 32, 33, token_ids=tuple(range(32))).block_hashes(16)) == 1
