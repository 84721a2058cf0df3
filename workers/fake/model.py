"""The fake engine's model: which token follows, its text, and its logprob.

The "KV" of a sequence is a digest of its tokens, and of the weights that computed each. The next
token depends on the digest and the seed alone, so a decode worker that received no KV, or the KV of
another prompt, generates different tokens from the first on.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from pdserve.types import PositionLogprobs, RoutedExperts, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pdserve.types import MediaItem, SamplingParams

EOS = 2
FIRST_WORD = 12
MIN_VOCAB_SIZE = 64

_ATTEMPTS = 256
_SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def kv_of(token_ids: Sequence[int], adapter: str = "", media: Sequence[MediaItem] = ()) -> bytes:
    """Return the KV of a prompt: 8 bytes. It depends on the hashes of its media."""
    hashes = "".join(f"{item.offset}/{item.hash}\0" for item in media)
    return _digest((adapter + hashes).encode() + struct.pack(f"<{len(token_ids)}I", *token_ids))


def extend(kv: bytes, token_ids: Iterable[int], weights: str = "") -> bytes:
    """Return the KV after `token_ids` were computed one by one, with `weights`."""
    for token_id in token_ids:
        kv = _digest(kv + struct.pack("<I", token_id) + weights.encode())
    return kv


def next_token(kv: bytes, seed: int | None, vocab_size: int, forbidden: Collection[int]) -> int:
    """Return the token after `kv`. Avoid `forbidden` tokens if possible."""
    token = FIRST_WORD
    for attempt in range(_ATTEMPTS):
        number = int.from_bytes(_digest(kv + f"{seed}/{attempt}".encode()), "little")
        is_eos = number % 64 == 0
        token = EOS if is_eos else FIRST_WORD + (number >> 6) % (vocab_size - FIRST_WORD)
        if token not in forbidden:
            break
    return token


def embedding_of(token_ids: Sequence[int]) -> bytes:
    """Return eight numbers from -1 to 1 that depend on every token."""
    numbers = struct.unpack("<8i", hashlib.sha256(kv_of(token_ids)).digest())
    return struct.pack("<8f", *(number / 2**31 for number in numbers))


def text_of(token_id: int) -> str:
    """Return the text of a token: a word after a blank, or nothing for a special token."""
    number, word = token_id - FIRST_WORD, ""
    while number >= 0:
        number, index = divmod(number, len(_SYLLABLES))
        word += _SYLLABLES[index]
        if not number:
            return f" {word}"
    return ""


def logprobs_of(token_id: int, alternatives: int) -> PositionLogprobs:
    """Return the sampled token as the likeliest, followed by others."""
    others = (x for x in range(FIRST_WORD, MIN_VOCAB_SIZE) if x != token_id)
    ids = [token_id, *(x for x, _ in zip(others, range(alternatives - 1), strict=False))]
    ranked = [TokenLogprob(x, text_of(x), -0.5 - rank, rank + 1) for rank, x in enumerate(ids)]
    return PositionLogprobs(ranked[0], tuple(ranked[:alternatives]))


def prompt_logprobs_of(token_ids: Sequence[int], alternatives: int) -> tuple[PositionLogprobs, ...]:
    """Return the logprobs of a prompt; its first token has none."""
    first = TokenLogprob(token_ids[0], text_of(token_ids[0]), 0.0, 0)
    return PositionLogprobs(first), *(logprobs_of(x, alternatives) for x in token_ids[1:])


def experts_of(token_ids: Sequence[int]) -> RoutedExperts:
    """Return the experts of tokens: two in each of two layers, which depend on the token alone."""
    ids = (bytes((x % 5, x % 7, x % 11, x % 13)) for x in token_ids)
    return RoutedExperts(layers=2, per_token=2, id_bytes=1, ids=b"".join(ids))


def scores_of(
    kv: bytes,
    answer: Sequence[int],
    seed: int | None,
    vocab_size: int,
    alternatives: int,
    weights: str = "",
) -> tuple[PositionLogprobs, ...]:
    """Return the logprobs of tokens as an answer after `kv`: those of the model's own tokens, or 1
    less for others."""
    found = []
    for token in answer:
        best = logprobs_of(next_token(kv, seed, vocab_size, ()), alternatives)
        mine = best.sampled
        if token != mine.token_id:
            mine = TokenLogprob(token, text_of(token), mine.logprob - 1.0, 2)
        found.append(PositionLogprobs(mine, best.top))
        kv = extend(kv, (token,), weights)
    return tuple(found)


class Text:
    """Incremental text of one sequence, as in vLLM: stop strings, and text held back while a stop
    string may be forming. State: all text, and how much of it was reported."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._text = ""
        self._reported = 0
        self._tokens = 0
        longest = max((len(x) for x in sampling.stop), default=1)
        self._hold_back = 0 if sampling.include_stop_str_in_output else longest - 1

    def resume(self, token_ids: Iterable[int]) -> None:
        """Add tokens generated elsewhere, without a stop among them, as reported."""
        for token_id in token_ids:
            self.push(token_id)
        self.take(finished=False)

    def push(self, token_id: int, *, silent: bool = False) -> str | None:
        """Add a token, without its text if `silent`. Return the stop string that it completes; the
        text then ends before that string, or after it if the request includes it."""
        self._tokens += 1
        before = len(self._text)
        self._text += "" if silent else text_of(token_id)
        if self._tokens <= self._sampling.min_tokens:
            return None
        for stop in self._sampling.stop:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                included = len(stop) if self._sampling.include_stop_str_in_output else 0
                self._text = self._text[: at + included]
                return stop
        return None

    def take(self, *, finished: bool) -> str:
        """Return the text that may be reported now and was not yet."""
        end = len(self._text) if finished else max(0, len(self._text) - self._hold_back)
        start, self._reported = self._reported, max(self._reported, end)
        return self._text[start : self._reported]
