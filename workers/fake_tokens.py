"""The fake engine's model: which token follows, what it reads as, how likely it was.

The "KV cache" of a sequence is a digest of its tokens. The next token depends on the digest and the
seed alone, so a decode worker that got no digest, or the digest of another prompt, says something
else from its first token on. A few tokens are halves of a character, as with a real vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from pdserve.types import PositionLogprobs, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

EOS = 2
LEAD = 3
TAILS = range(4, 12)
FIRST_WORD = 12
MIN_VOCAB_SIZE = 64

_ATTEMPTS = 256

_SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi")


def kv_of(token_ids: Sequence[int]) -> bytes:
    """The KV of a prompt: 8 bytes."""
    return _digest(struct.pack(f"<{len(token_ids)}I", *token_ids))


def extend(kv: bytes, token_ids: Iterable[int]) -> bytes:
    """The KV once `token_ids`, generated one by one, are behind what `kv` covers."""
    for token_id in token_ids:
        kv = _digest(kv + struct.pack("<I", token_id))
    return kv


def next_token(
    kv: bytes,
    *,
    seed: int | None,
    last: int | None,
    vocab_size: int,
    forbidden: Collection[int] = (),
) -> int:
    """The token after `kv`. `last` is the last generated token, None where there is none yet;
    `forbidden` tokens are passed over while there are others to be found."""
    if last == LEAD:
        return TAILS[_number(kv, "tail") % len(TAILS)]
    token = FIRST_WORD
    for attempt in range(_ATTEMPTS):
        token = _choose(_number(kv, f"{seed}/{attempt}"), vocab_size)
        if token not in forbidden:
            break
    return token


def token_bytes(token_id: int) -> bytes:
    """The UTF-8 bytes of a token; LEAD and TAILS are the halves of accented letters."""
    if token_id == LEAD:
        return b"\xc3"
    if token_id in TAILS:
        return bytes([0xA0 + token_id - TAILS.start])
    if token_id < FIRST_WORD:
        return b""
    number, word = token_id - FIRST_WORD, ""
    while True:
        number, index = divmod(number, len(_SYLLABLES))
        word += _SYLLABLES[index]
        if not number:
            return f" {word}".encode()


def logprobs_of(
    kv: bytes, token_id: int, *, alternatives: int, vocab_size: int
) -> PositionLogprobs:
    """The sampled token as the likeliest, and `alternatives` tokens, best first, itself among
    them."""
    logprob = -(1 + _number(kv, "logprob") % 2000) / 4000
    ids = [token_id]
    candidate = _number(kv, "candidate") % (vocab_size - FIRST_WORD)
    while len(ids) < alternatives:
        candidate = (candidate + 1) % (vocab_size - FIRST_WORD)
        if candidate + FIRST_WORD != token_id:
            ids.append(candidate + FIRST_WORD)
    ranked = tuple(
        TokenLogprob(x, token_bytes(x).decode(errors="replace"), logprob - rank, rank + 1)
        for rank, x in enumerate(ids)
    )
    return PositionLogprobs(sampled=ranked[0], top=ranked[:alternatives])


def _choose(number: int, vocab_size: int) -> int:
    share = number % 64
    if share == 0:
        return EOS
    if share <= 6:
        return LEAD
    return FIRST_WORD + (number >> 6) % (vocab_size - FIRST_WORD)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _number(kv: bytes, what: str) -> int:
    return int.from_bytes(_digest(kv + what.encode()), "little")
