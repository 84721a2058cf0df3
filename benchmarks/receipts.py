"""The servers' own accounts of their requests, summed up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.stats import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PHASES: Final = ("queue_s", "prefill_s", "transfer_s", "exposed_transfer_s", "decode_s")
TOTALS: Final = ("transfer_bytes", "transfer_blocks", "cached_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptSummary:
    """``phases`` is in seconds; ``transferred`` counts the requests whose blocks moved; the others
    count requests by worker, by where the first token came from, and by fallback used."""

    receipts: int
    transferred: int
    phases: Mapping[str, Distribution]
    totals: Mapping[str, int]
    prefill_workers: Mapping[str, int]
    decode_workers: Mapping[str, int]
    first_token_sources: Mapping[str, int]
    fallbacks: Mapping[str, int]


def summarise_receipts(receipts: Sequence[Mapping[str, object]]) -> ReceiptSummary | None:
    """Sum up receipts; None if there are none. A field that a receipt lacks is left out of it."""
    if not receipts:
        return None
    phases = {}
    for name in PHASES:
        found = distribution(_numbers(receipts, name))
        if found is not None:
            phases[name] = found
    return ReceiptSummary(
        receipts=len(receipts),
        transferred=sum(number > 0 for number in _numbers(receipts, "transfer_bytes")),
        phases=phases,
        totals={name: int(sum(_numbers(receipts, name))) for name in TOTALS},
        prefill_workers=_tally(receipt.get("prefill_worker") for receipt in receipts),
        decode_workers=_tally(receipt.get("decode_worker") for receipt in receipts),
        first_token_sources=_tally(receipt.get("first_token_source") for receipt in receipts),
        fallbacks=_tally(
            name
            for receipt in receipts
            if isinstance(used := receipt.get("fallbacks"), list | tuple)
            for name in used
        ),
    )


def _numbers(receipts: Sequence[Mapping[str, object]], name: str) -> list[float]:
    values = (receipt.get(name) for receipt in receipts)
    return [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _tally(values: Iterable[object]) -> dict[str, int]:
    return dict(sorted(Counter(str(value) for value in values if value).items()))
