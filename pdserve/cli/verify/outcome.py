"""What a check of `pdserve verify` is, and how it ends."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.cli.verify.endpoint import Endpoint, EndpointAnswer

CACHE_TRIES = 3
FILLER = "The workers of a service share what they know of each prompt before they answer it. "


@dataclass(frozen=True, slots=True)
class Passed:
    note: str = ""


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """`answers`: the requests that show the failure, and their answers."""

    what: str
    answers: Sequence[EndpointAnswer] = ()


@dataclass(frozen=True, slots=True)
class NotApplicable:
    why: str


Outcome = Passed | CheckFailed | NotApplicable


@dataclass(frozen=True, slots=True)
class Check:
    """`promise`: what holds if the check passes. `guards_against`: a failure that the `thread` on
    GitHub reports. `at_most`: limits of (requests sent, answer tokens requested); `per_slot`: the
    same for each concurrent request."""

    run: Callable[[Endpoint], Awaitable[Outcome]]
    promise: str
    guards_against: str
    thread: str
    at_most: tuple[int, int] = (0, 0)
    per_slot: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def link(self) -> str:
        return f"https://github.com/{self.thread}"

    def cost(self, concurrency: int) -> tuple[int, int]:
        """Return (maximum requests, maximum answer tokens requested)."""
        requests, tokens = self.per_slot
        return self.at_most[0] + concurrency * requests, self.at_most[1] + concurrency * tokens


def fresh(text: str) -> str:
    """Return a prompt that no cache has, because its first tokens are new."""
    return f"Note {secrets.token_hex(4)}. {text}"


def cached_tokens(answer: EndpointAnswer) -> int | None:
    details = (answer.usage or {}).get("prompt_tokens_details") or {}
    cached: int | None = details.get("cached_tokens")
    return cached
