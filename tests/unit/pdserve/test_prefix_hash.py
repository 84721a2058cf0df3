from __future__ import annotations

import pytest

from pdserve.model import prefix_hash
from pdserve.model.prefix_hash import chain, media_keys, root

TOKENS = [7] * 16
BLOCK = 4


def hashes(*items: tuple[str, int, int]) -> list[int]:
    return chain(TOKENS, BLOCK, root("m", BLOCK), media=media_keys(items, BLOCK))


def test_blocks_before_an_image_are_shared_and_blocks_from_it_on_are_not() -> None:
    red, blue = hashes(("red", 5, 3)), hashes(("blue", 5, 3))
    assert red[0] == blue[0] == hashes()[0]
    assert all(a != b for a, b in zip(red[1:], blue[1:], strict=True))


def test_an_image_at_another_place_or_in_another_order_is_another_prompt() -> None:
    ends = {
        hashes(*items)[-1]
        for items in (
            [("red", 2, 4)],
            [("red", 3, 4)],
            [("red", 2, 4), ("blue", 8, 4)],
            [("blue", 2, 4), ("red", 8, 4)],
        )
    }
    assert len(ends) == 4


def test_the_keys_of_a_block_are_those_of_vllm() -> None:
    # vLLM's _gen_mm_extra_hash_keys: hash, and the image's offset minus the block's.
    assert media_keys([("a", 2, 7), ("b", 9, 1)], BLOCK) == {
        0: [("a", 2)],
        1: [("a", -2)],
        2: [("a", -6), ("b", 1)],
    }


@pytest.mark.parametrize("images", [[], [("red", 900, 3)]])
def test_the_hashes_of_a_long_prompt_that_was_seen_are_those_of_one_that_was_not(
    images: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_hash, "_MOST_RUNS", 3)
    tokens, media = [*range(1, 3000)], media_keys(images, BLOCK)
    one_by_one, parent = [], root("m", BLOCK)
    for index in range(len(tokens) // BLOCK):
        block = tokens[BLOCK * index : BLOCK * (index + 1)]
        own = {0: media[index]} if index in media else {}
        (parent,) = chain(block, BLOCK, parent, media=own)
        one_by_one.append(parent)
    for _ in range(2):
        assert chain(tokens, BLOCK, root("m", BLOCK), media=media) == one_by_one
    changed = [*tokens[:600], 7, *tokens[601:]]
    found = chain(changed, BLOCK, root("m", BLOCK), media=media)
    assert [a == b for a, b in zip(found, one_by_one, strict=True)].index(False) == 150
    assert len(prefix_hash._RUNS._packed) <= 3
