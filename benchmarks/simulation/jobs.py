"""What a modelled engine is given: one request's part on one worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Part(Enum):
    """Of a request. A `DECODE` waits for KV before it runs."""

    PREFILL = auto()
    DECODE = auto()
    WHOLE = auto()


@dataclass(slots=True, eq=False)
class Job:
    """Changed by its engine alone. `blocks` are held from its admission to its end (of a prefill:
    until its KV was taken). `to_compute` prompt tokens are left; `token_at` is when its last token
    came. It hears `on_first` with its first token, unless it came with one, and `on_end` with its
    last; of a prefill `on_first` is both."""

    part: Part
    prompt_tokens: int
    output_tokens: int
    blocks: int
    on_first: Callable[[float], None]
    on_end: Callable[[float], None]
    prefix: Sequence[int] = ()
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    cached_tokens: int = 0
    to_compute: int = 0
    token_at: float = 0.0
    joined_step: int = 0
    joined_context: int = 0
    gone: bool = False

    @property
    def computed(self) -> int:
        """Prompt tokens that have KV."""
        return self.prompt_tokens - self.to_compute
