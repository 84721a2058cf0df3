"""Counts the open requests of each LoRA adapter. An adapter is unloaded only at zero."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.walk import Answered, Proceed, Walk


class AdaptersStep:
    """State: the number of open requests by the key of their adapter."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    def count(self, adapter: str) -> int:
        return self._open[adapter]

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        if not (adapter := walk.request.adapter_key):
            return await proceed(walk)
        self._open[adapter] += 1
        try:
            return await proceed(walk)
        finally:
            self._open[adapter] -= 1
            if not self._open[adapter]:
                del self._open[adapter]
