"""Comparisons and records for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.compare.result import (
    CompareResult,
    Measurement,
    ProcessorUse,
    VariantFacts,
    VariantSettings,
)
from benchmarks.metrics import RequestTimeline

if TYPE_CHECKING:
    from collections.abc import Sequence

USE = ProcessorUse(
    window_s=10.0, router_s=1.0, workers_s=8.0, client_s=0.5, idle_s=0.1, others_s=0.2
)
SETTINGS = VariantSettings(
    workers={"aggregated": 2},
    cores=2,
    kv_cache_tokens=4096,
    of_workers={"block_size": ("16",), "max_num_batched_tokens": ("2048",)},
)
CUT = {
    "requests": 4,
    "mean_input": 100.0,
    "mean_output": 3.0,
    "mean_input_before": 400.0,
    "mean_output_before": 12.0,
}


def receipt(*, moved: int = 0) -> dict[str, Any]:
    return {
        "queue_s": 0.01,
        "prefill_s": 0.08,
        "transfer_s": 0.002 if moved else 0.0,
        "exposed_transfer_s": 0.001 if moved else 0.0,
        "decode_s": 0.1,
        "transfer_bytes": moved,
        "transfer_blocks": moved // 1024,
        "cached_tokens": 0,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "first_token_source": "prefill",
        "fallbacks": [],
    }


def record(
    index: int = 0, *, ttft_s: float = 0.1, tpot_s: float = 0.05, **changes: Any
) -> RequestTimeline:
    """Return the record of a request due after `index` seconds and answered with three tokens."""
    sent = changes.get("sent_s", float(index))
    chunks = [round(sent + ttft_s + n * tpot_s, 6) for n in range(3)]
    whole = RequestTimeline(
        index=index,
        request_id=f"r{index}",
        input_tokens=100 + 10 * index,
        output_tokens=3,
        scheduled_s=float(index),
        sent_s=sent,
        chunk_s=chunks,
        chunk_tokens=[1, 1, 1],
        end_s=chunks[-1],
        status="ok",
        error=None,
        prompt_tokens=100 + 10 * index,
        completion_tokens=3,
        receipt=receipt(),
    )
    return replace(whole, **changes)


def failed(index: int) -> RequestTimeline:
    nothing: dict[str, Any] = {"chunk_s": [], "chunk_tokens": [], "completion_tokens": None}
    return record(index, status="failed", error="HTTP 429: full", receipt=None, **nothing)


def measured(
    variant: str, number: int, records: Sequence[RequestTimeline], **changes: Any
) -> Measurement:
    whole = Measurement(
        variant=variant,
        kind="round",
        number=number,
        rate_per_s=1.0,
        speedup=2.0,
        workload=CUT,
        processor=USE,
        records=tuple(records),
    )
    return replace(whole, **changes)


def rounds(variant: str, ttfts: Sequence[float], **changes: Any) -> list[Measurement]:
    """Return one round for each TTFT, with four requests that all have it."""
    return [
        measured(variant, number, [record(i, ttft_s=ttft, **changes) for i in range(4)])
        for number, ttft in enumerate(ttfts)
    ]


def variant(name: str, **changes: Any) -> VariantFacts:
    whole = VariantFacts(name=name, kind="started", api="grpc", model="m", settings=SETTINGS)
    return replace(whole, **changes)


def result(measurements: Sequence[Measurement], **changes: Any) -> CompareResult:
    """Return a result of the variants `1P1D` and `2A`, by default; ratios are relative to `2A`."""
    whole = CompareResult(
        created="2026-01-02T03:04:05+00:00",
        trace={"name": "chat", "digest": "d"},
        settings={"rate_per_s": 1.0, "rounds": 3, "requests": 4, "scale_lengths": "1/4"},
        host={"cpu": "a processor", "cores": 8, "memory_bytes": 1 << 34},
        slo_s={"ttft": 0.25, "tpot": 0.06},
        baseline="2A",
        variants=(variant("1P1D"), variant("2A")),
        measurements=tuple(measurements),
    )
    return replace(whole, **changes)
