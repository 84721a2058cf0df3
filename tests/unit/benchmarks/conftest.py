"""Makers of the values that most of these tests start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from benchmarks.records import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.records import Status


RecordMaker = Callable[..., RequestRecord]


@pytest.fixture
def make_record() -> RecordMaker:
    """A record whose chunks hold one token each and whose answer has the length asked for."""

    def make(
        scheduled_s: float,
        sent_s: float | None,
        chunk_s: Sequence[float],
        *,
        status: Status = "ok",
        output_tokens: int | None = None,
        chunk_tokens: Sequence[int] | None = (),
        receipt: Mapping[str, object] | None = None,
    ) -> RequestRecord:
        counts = (1,) * len(chunk_s) if chunk_tokens == () else chunk_tokens
        tokens = output_tokens if output_tokens is not None else sum(counts or ())
        return RequestRecord(
            index=0,
            request_id="r",
            input_tokens=100,
            output_tokens=tokens,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            chunk_s=tuple(chunk_s),
            chunk_tokens=None if counts is None else tuple(counts),
            end_s=chunk_s[-1] if chunk_s else None,
            status=status,
            error=None if status == "ok" else f"it {status}",
            completion_tokens=tokens if status == "ok" else None,
            receipt=receipt,
        )

    return make
