"""Keeps the images of a prompt until its answer ends: a retry may compute the prompt again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.admission.memory import MediaMemory
    from router.walk import Answered, Proceed, Walk


class MediaStep:
    """Raises Overloaded if neither memory nor disk has room for the images."""

    def __init__(self, memory: MediaMemory) -> None:
        self._memory = memory

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        if (pixels := walk.request.pixels) is None:
            return await proceed(walk)
        async with self._memory.keep(pixels):
            return await proceed(walk)
