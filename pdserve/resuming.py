"""How a client goes on with an answer that broke off: what to ask next, and what of it is new.

One answer goes on after the tokens that the client has. Several answers (n above 1) are asked for
again from the start with the same seed, and what the client has is left out of what comes; where
it comes out differently the answer fails, for it cannot be made whole. No I/O.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from pdserve.errors import InternalError
from pdserve.types import MAX_SEED
from pdserve.v1 import generation_pb2 as g

_SEED_BITS = 48


@dataclass(frozen=True, slots=True)
class _Again:
    tokens: int = 0
    characters: int = 0
    logprobs: int = 0


@dataclass(slots=True)
class _Had:
    """What the client has of one answer, and how much of it has come again."""

    token_ids: list[int] = field(default_factory=list)
    characters: int = 0
    logprobs: int = 0
    finished: bool = False
    again: _Again = _Again()


class Resuming:
    """State: one request, and what the client has of its answers."""

    def __init__(self, request: g.GenerateRequest) -> None:
        self._request = request
        self._n = max(1, request.sampling.n)
        self._had: dict[int, _Had] = {}

    def make_repeatable(self) -> None:
        """Fixes what would be drawn anew by whoever is asked again."""
        sampling = self._request.sampling
        has_seed = sampling.HasField("seed") and sampling.seed != -1
        if self._n > 1 and not has_seed:
            sampling.seed = secrets.randbits(_SEED_BITS) % (MAX_SEED - self._n)

    def next_request(self) -> g.GenerateRequest:
        """What to ask now."""
        request = g.GenerateRequest()
        request.CopyFrom(self._request)
        for had in self._had.values():
            had.again = _Again()
        if self._n == 1 and 0 in self._had:
            had = self._had[0]
            request.resume_token_ids.extend(had.token_ids)
            had.again = _Again(len(had.token_ids), had.characters, had.logprobs)
        return request

    @property
    def tokens(self) -> int:
        """How many tokens the client has."""
        return sum(len(had.token_ids) for had in self._had.values())

    def take(self, message: g.GenerateResponse) -> g.GenerateResponse | None:
        """What of `message` the client does not have; None where it has all of it. Raises
        InternalError where it does not say what the client has."""
        had = self._had.setdefault(message.index, _Had())
        again = had.again
        skip = len(had.token_ids) - again.tokens
        characters = had.characters - again.characters
        logprobs = had.logprobs - again.logprobs
        known = had.token_ids[again.tokens : again.tokens + len(message.token_ids)]
        had.again = replace(
            again,
            tokens=again.tokens + len(message.token_ids),
            characters=again.characters + len(message.text),
            logprobs=again.logprobs + len(message.logprobs),
        )
        if list(message.token_ids[:skip]) != known:
            raise InternalError("the answer came out differently when it was asked for again")
        if skip or characters or logprobs:
            del message.token_ids[:skip]
            del message.logprobs[:logprobs]
            message.text = message.text[characters:]
        is_last = bool(message.finish_reason) and (not had.finished or message.HasField("usage"))
        had.token_ids += message.token_ids
        had.characters += len(message.text)
        had.logprobs += len(message.logprobs)
        had.finished |= bool(message.finish_reason)
        is_new = message.token_ids or message.text or message.logprobs
        return message if is_new or is_last else None
