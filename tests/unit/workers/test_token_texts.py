"""Texts of tokens that the engine holds back, and positions of tokens in a part."""

from __future__ import annotations

from typing import Any

from workers.vllm.parsing.token_texts import TokenPlaces, UnreleasedTokens


class Letters:
    """A detokenizer: each token is a letter."""

    output_text = ""

    def update(self, token_ids: list[int], _: bool) -> None:
        self.output_text += "".join(map(chr, token_ids))


def held() -> UnreleasedTokens:
    detokenizer: Any = Letters()
    return UnreleasedTokens(detokenizer)


def test_a_token_is_taken_once_its_whole_text_is_released() -> None:
    tokens = held()
    tokens.add(list(b"ab"), "")
    assert list(tokens.take()) == []
    tokens.add(list(b"c"), "ab")
    assert list(tokens.take()) == [([97], "a"), ([98], "b")]
    assert (tokens.token_ids, tokens.released) == ([99], "")


def test_tokens_whose_text_the_engine_changed_are_taken_together() -> None:
    tokens = held()
    tokens.add(list(b"abc"), "aX")
    assert list(tokens.take()) == [([97], "a"), ([98, 99], "X")]
    assert (tokens.token_ids, tokens.released) == ([], "")


def test_each_token_of_a_text_is_named_once_and_counted_from_the_beginning() -> None:
    places = TokenPlaces()
    places.add(1, 2)
    places.begin_here()
    for end in (4, 4, 7, 9):  # the second one has no text: it belongs to what follows
        places.add(1, end)
    assert places.named(2, 4) == [0]
    assert places.named(4, 7) == [1, 2]
    assert places.named(4, 7) == []
    assert places.rest() == [3]
    places.name_again()
    assert places.named(2, 9) == [0, 1, 2, 3]
