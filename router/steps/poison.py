"""Refuses a request under which workers died, and remembers one that was not answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

if TYPE_CHECKING:
    from router.attempt.suspects import Suspects
    from router.walk import Answered, Proceed, Walk


class PoisonStep:
    """Expects an unchanged request after the walk, because it remembers the digest after a
    death."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        suspects, request, is_answered = self._suspects, walk.request, False
        suspicion = suspects.begin(request)
        try:
            done = await proceed(structs.replace(walk, suspicion=suspicion))
            is_answered = True
            return done
        finally:
            suspects.end(request, suspicion, answered=is_answered)
