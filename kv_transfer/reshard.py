"""A range of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.errors import KvTransferError


@dataclass(frozen=True, slots=True)
class Span:
    """[start, end), never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise KvTransferError(f"[{self.start}, {self.end}) is no span")

    def __len__(self) -> int:
        return self.end - self.start
