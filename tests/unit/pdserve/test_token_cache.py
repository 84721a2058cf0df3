"""Token ids of texts whose parts are cached are those of the whole text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as FastTokenizer

from pdserve.model import tokenizer as tokenizer_module
from pdserve.model.token_cache import TokenCache
from pdserve.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
# Added tokens that depend on what stands beside them, or that overlap others.
AWKWARD = [
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("<one>", single_word=True, normalized=False),
    AddedToken("<s><s>", normalized=False),
    AddedToken("x<|im", normalized=False),
    AddedToken("|>", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken("NORMAL", normalized=True),
    AddedToken("<normal>", normalized=True),
]
WORDS = ["the", " cat", "sat ", "\n", "\n\n", " ", "   ", "é", "e\u0301", "word", "words", "12345"]
WORDS += [
    "x",
    "<",
    "|",
    ">",
    "<|",
    "im_start",
    "s>",
    "<s",
    "normal",
    "NORMAL",
    "NoRmal",
    "🙂",
    "'s",
]
TEXTS = ["the cat sat on the mat", "12345 words, é and 🙂", "it's the\n\n  cat's word"] * 9


def _byte_level(pattern: str | None = None) -> FastTokenizer:
    fast = FastTokenizer(models.BPE())
    if pattern is None:  # GPT-2
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False),
    )
    return fast


def _llama3() -> FastTokenizer:
    return _byte_level(
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


def _metaspace(scheme: str) -> FastTokenizer:
    fast = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first")
    fast.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False),
    )
    return fast


def _llama2() -> FastTokenizer:
    """Without a pre-tokenizer: all text between two added tokens is one word."""
    fast = _metaspace("always")
    fast.pre_tokenizer = None
    prepend = normalizers.Prepend("▁")
    fast.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "▁")])
    return fast


def _unigram() -> FastTokenizer:
    fast = FastTokenizer(models.Unigram())
    fast.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    fast.train_from_iterator(TEXTS, trainer)
    return fast


def _word_piece() -> FastTokenizer:
    fast = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=["[UNK]"], show_progress=False
    )
    fast.train_from_iterator(TEXTS, trainer)
    return fast


def _finish(fast: FastTokenizer, *, awkward: bool) -> Tokenizer:
    fast.add_special_tokens(SPECIAL)
    if awkward:
        fast.add_tokens(AWKWARD)
    around = [(x, fast.token_to_id(x)) for x in ("<s>", "</s>")]
    fast.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=around)
    return Tokenizer(fast, None)


_KINDS: dict[str, Callable[[], FastTokenizer]] = {
    "gpt2": _byte_level,
    "llama3": _llama3,
    "llama2": _llama2,
    "unigram": _unigram,
    "word_piece": _word_piece,
    **{f"metaspace_{x}": partial(_metaspace, x) for x in ("always", "first", "never")},
}


@pytest.fixture(scope="module", params=_KINDS)
def made(request: pytest.FixtureRequest) -> Sequence[Tokenizer]:
    make = _KINDS[request.param]
    return [_finish(make(), awkward=x) for x in (False, True)]


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LEAST_PART", 1)
        patch.setattr(tokenizer_module, "LEAST_CACHED", 0)
        yield


CONTENTS = [*SPECIAL, *(x.content for x in AWKWARD), *WORDS]
PIECES = st.lists(st.sampled_from(CONTENTS) | st.text(max_size=5), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=4), st.booleans())
def test_each_turn_has_the_tokens_of_the_whole_text(
    made: Sequence[Tokenizer], turns: list[list[str]], add: bool
) -> None:
    for tokenizer in made:
        parts, text = TokenCache(1 << 20).of(""), ""
        for turn in turns:
            text += "".join(turn)
            expected = tokenizer.encode(text, add_special_tokens=add)
            assert tokenizer.encode(text, add_special_tokens=add, parts=parts) == expected


def test_texts_are_cut_only_where_that_changes_nothing(made: Sequence[Tokenizer]) -> None:
    plain, awkward = made
    text = "a<s>b<|im_start|>c[INST]d"
    assert plain._cuts.parts(text) == ["a", "<s>b", "<|im_start|>c", "[INST]d"]
    # `<s>` begins a longer token, `<|im_start|>` may begin in one.
    assert awkward._cuts.parts(text) == ["a<s>b<|im_start|>c", "[INST]d"]


class Encoding:
    """Encodes a text as its characters. `texts`: those that were encoded."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.texts += texts
        return [list(map(ord, x)) for x in texts]


def test_only_new_parts_are_encoded() -> None:
    parts, encode = TokenCache(1 << 20).of("a"), Encoding()
    for texts in (["one", "two"], ["one", "two", "three", "one"]):
        assert parts.encode(b"t", texts, encode) == tuple(map(ord, "".join(texts)))
    assert encode.texts == ["one", "two", "three"]


def test_nobody_finds_the_parts_of_another_tenant_salt_or_tokenizer() -> None:
    cache, encode = TokenCache(1 << 20), Encoding()
    for tenant, salt, tokenizer in (
        *(("a", "", b"t"), ("b", "", b"t"), ("a", "s", b"t"), ("a", "", b"u")),
        ("a", "s", b"t"),
    ):
        cache.of(tenant, salt).encode(tokenizer, ["text"], encode)
    assert encode.texts == ["text"] * 4


def test_a_full_cache_drops_the_least_used_parts_of_the_tenant_that_has_most() -> None:
    cache, encode = TokenCache(4000), Encoding()
    cache.of("small").encode(b"t", ["mine"], encode)
    large = cache.of("large")
    for i in range(100):
        large.encode(b"t", ["often", f"text {i}"], encode)
        assert cache.size <= 4000
    encode.texts.clear()
    cache.of("small").encode(b"t", ["mine"], encode)
    large.encode(b"t", ["often", "text 99"], encode)
    assert encode.texts == []
    large.encode(b"t", ["text 0"], encode)
    assert encode.texts == ["text 0"]
