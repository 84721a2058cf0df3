"""The mirror of an engine's prefix cache against a naive account of it, and the fake engine's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.model import prefix_hash
from pdserve.types import MediaItem, SamplingParams
from workers.cache.mirror import CacheMirror
from workers.engine import AggregatedPhase, CacheChange, Work
from workers.fake.prefix_cache import PrefixCache as FakeCache

SIZE = 2
ROOT = prefix_hash.root("m", SIZE)
# Prompts that share beginnings: blocks are digits, a prompt is a string of them.
PROMPTS = st.text("01", min_size=1, max_size=6)


def key(prefix: str) -> bytes:
    """Return the engine's hash of the last block of `prefix`."""
    return prefix.encode()


def tokens(prompt: str) -> list[int]:
    return [int(digit) for digit in prompt for _ in range(SIZE)]


def hash_of(prefix: str) -> int:
    return prefix_hash.chain(tokens(prefix), SIZE, ROOT)[-1]


def work(token_ids: tuple[int, ...], *media: MediaItem) -> Work:
    return Work(1, "r", token_ids, SamplingParams(), AggregatedPhase(), media=media)


class Reader:
    """A mirror of the changes. Asserts that each block follows its parent."""

    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}

    def read(self, change: CacheChange) -> None:
        for gone in change.removed:
            del self.blocks[gone]
        for new in change.stored:
            assert new not in self.blocks
            self.blocks[new] = None


def store(mirror: CacheMirror, prompt: str, start: int) -> None:
    keys = [key(prompt[: i + 1]) for i in range(start, len(prompt))]
    mirror.store(keys, key(prompt[:start]) if start else None, tokens(prompt[start:]))


def shown(cached: set[str]) -> set[str]:
    """Return the blocks that a lookup can reach."""
    return {x for x in cached if all(x[:i] in cached for i in range(1, len(x)))}


@settings(max_examples=200)
@given(st.data())
def test_the_mirror_shows_only_blocks_that_a_lookup_can_reach(data: st.DataObject) -> None:
    mirror, reader, cached = CacheMirror("m", SIZE), Reader(), set[str]()
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(("store", "store", "remove", "take", "clear")))
        if act == "store":
            prompt = data.draw(PROMPTS)
            # An engine computes a prompt behind what it has of it.
            missing = [i for i in range(len(prompt)) if prompt[: i + 1] not in cached]
            start = missing[0] if missing else len(prompt)
            store(mirror, prompt, start)
            cached |= {prompt[: i + 1] for i in range(start, len(prompt))}
        elif act == "remove" and cached:
            gone = data.draw(st.sampled_from(sorted(cached)))
            # Blocks after it are not shown again, so the engine loses them too here.
            cached = {x for x in cached if not x.startswith(gone)}
            mirror.remove(key(gone))
        elif act == "clear":
            cached.clear()
            mirror.clear()
        else:
            reader.read(mirror.take())
            assert set(reader.blocks) == {hash_of(x) for x in shown(cached)}
            assert len(mirror) == len(reader.blocks)
    reader.read(mirror.take())
    assert set(reader.blocks) == {hash_of(x) for x in shown(cached)}
    order = {x: i for i, x in enumerate(reader.blocks)}
    for prefix in shown(cached):
        if len(prefix) > 1:
            assert order[hash_of(prefix[:-1])] < order[hash_of(prefix)]


def test_blocks_behind_an_unknown_one_are_left_out() -> None:
    mirror = CacheMirror("m", SIZE)
    # What stands behind embeddings has none of its own: only its parent tells.
    mirror.store([key("01"), key("010")], key("0"), tokens("10"))
    assert not mirror.take()
    assert len(mirror) == 0


def test_hashes_tell_models_and_block_sizes_and_places_apart() -> None:
    ids = tuple(range(8))
    chains = [
        prefix_hash.chain(ids, 2, prefix_hash.root("m", 2)),
        prefix_hash.chain(ids, 2, prefix_hash.root("other", 2)),
        prefix_hash.chain(ids, 2, prefix_hash.root("m", 2, "", "salt")),
        prefix_hash.chain(ids, 4, prefix_hash.root("m", 4)),
        prefix_hash.chain((0, 1) * 4, 2, prefix_hash.root("m", 2))[1:],
    ]
    found = [x for chain in chains for x in chain]
    assert len(set(found)) == len(found) == 4 + 4 + 4 + 2 + 3
    assert prefix_hash.unpack(prefix_hash.pack(found)) == found


@settings(max_examples=100)
@given(st.lists(PROMPTS, max_size=20), st.integers(1, 8))
def test_the_fake_cache_is_bounded_and_closed(prompts: list[str], room: int) -> None:
    cache, reader = FakeCache("m", SIZE, room), Reader()
    for prompt in prompts:
        ids = tuple(tokens(prompt))
        cache.keep(work(ids))
        reader.read(cache.take() or CacheChange())
        assert len(reader.blocks) <= room
        chain = [hash_of(prompt[: i + 1]) for i in range(len(prompt))]
        held = [x in reader.blocks for x in chain]
        assert held == sorted(held, reverse=True)
        # One more token, so that the whole prompt may be taken from the cache.
        assert cache.hit(work((*ids, 0))) == sum(held) * SIZE == min(len(prompt), room) * SIZE


def test_prompts_share_the_blocks_before_the_first_image_that_differs() -> None:
    cache, ids = FakeCache("m", SIZE, 9), tuple(range(8))
    red, blue = (MediaItem("image", name, offset=2, length=3) for name in ("red", "blue"))
    cache.keep(work(ids, red))
    change = cache.take()
    assert change is not None
    places = prefix_hash.media_keys([("red", 2, 3)], SIZE)
    assert list(change.stored) == prefix_hash.chain(ids, SIZE, ROOT, media=places)
    assert cache.hit(work((*ids, 0), red)) == 8
    assert cache.hit(work((*ids, 0), blue)) == cache.hit(work((*ids, 0))) == 2


def test_known_blocks_before_an_image_do_not_move_it() -> None:
    mirror, places = CacheMirror("m", SIZE), prefix_hash.media_keys([("red", 4, 2)], SIZE)
    store(mirror, "00", 0)
    known = mirror.take().stored
    mirror.store([key(x) for x in ("0", "00", "00r", "00r1")], None, tokens("0001"), media=places)
    whole = prefix_hash.chain(tokens("0001"), SIZE, ROOT, media=places)
    assert [*known, *mirror.take().stored] == whole


def test_a_block_that_stays_keeps_nothing_of_those_after_it() -> None:
    mirror = CacheMirror("m", SIZE)
    store(mirror, "0", 0)
    for _ in range(3):
        store(mirror, "012", 1)
        mirror.remove(key("012"))
        mirror.remove(key("01"))
    assert not mirror._children
    assert not mirror._parents


def test_a_block_in_host_memory_is_shown_once_its_tokens_are_known() -> None:
    mirror, held = CacheMirror("m", SIZE), set[int]()

    def shown_in_tier() -> set[int]:
        change = mirror.take()
        held.difference_update(change.tier_removed)
        held.update(change.tier_stored)
        return held

    store(mirror, "01", 0)
    mirror.store_in_tier(key("0"))
    mirror.store_in_tier(key("00"))  # loaded from a file: not in the cache yet
    mirror.clear()
    assert shown_in_tier() == {hash_of("0")}
    store(mirror, "00", 0)
    assert shown_in_tier() == {hash_of("0"), hash_of("00")}
    mirror.remove_from_tier(key("0"))
    mirror.remove_from_tier(key("1"))
    assert shown_in_tier() == {hash_of("00")}
    mirror.store_in_tier(key("0"))
    mirror.remove_from_tier(key("0"))
    assert not mirror.take()
