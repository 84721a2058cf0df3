"""Results of comparisons as tests need them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.compare.processor import ProcessorUse
from benchmarks.compare.result import ArmFacts, CompareResult, Measurement
from benchmarks.compare.settings import ArmSettings
from benchmarks.records import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

USE = ProcessorUse(
    window_s=10.0, router_s=1.0, workers_s=8.0, client_s=0.5, idle_arms_s=0.1, others_s=0.2
)
SETTINGS = ArmSettings(
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


def receipt(*, moved: int = 0, prefill: str = "a-0", decode: str = "a-0") -> dict[str, Any]:
    return {
        "queue_s": 0.01,
        "prefill_s": 0.08,
        "transfer_s": 0.002 if moved else 0.0,
        "exposed_transfer_s": 0.001 if moved else 0.0,
        "decode_s": 0.1,
        "transfer_bytes": moved,
        "transfer_blocks": moved // 1024,
        "cached_tokens": 0,
        "prefill_worker": prefill,
        "decode_worker": decode,
        "first_token_source": "prefill",
        "fallbacks": [],
    }


def record(
    index: int, *, ttft_s: float, tpot_s: float = 0.05, lag_s: float = 0.0, **changes: Any
) -> RequestRecord:
    """A request due `index` seconds in, answered with three tokens; `changes` are of the record."""
    sent = index + lag_s
    chunks = tuple(round(sent + ttft_s + n * tpot_s, 6) for n in range(3))
    whole = RequestRecord(
        index=index,
        request_id=f"r{index}",
        input_tokens=100 + 10 * index,
        output_tokens=3,
        scheduled_s=float(index),
        sent_s=sent,
        chunk_s=chunks,
        chunk_tokens=(1, 1, 1),
        end_s=chunks[-1],
        status="ok",
        prompt_tokens=100 + 10 * index,
        completion_tokens=3,
        receipt=receipt(),
    )
    return replace(whole, **changes)


def failed(index: int) -> RequestRecord:
    nothing: dict[str, Any] = {"chunk_s": (), "chunk_tokens": (), "completion_tokens": None}
    return record(
        index, ttft_s=0.1, status="failed", error="HTTP 429: full", receipt=None, **nothing
    )


def measured(
    arm: str, number: int, records: Sequence[RequestRecord], **changes: Any
) -> Measurement:
    whole = Measurement(
        arm=arm,
        kind="round",
        number=number,
        rate_per_s=1.0,
        speedup=2.0,
        workload=CUT,
        processor=USE,
        records=tuple(records),
    )
    return replace(whole, **changes)


def rounds(arm: str, ttfts: Sequence[float], **changes: Any) -> list[Measurement]:
    """One round for each TTFT, of four requests that all have it."""
    return [
        measured(arm, number, [record(i, ttft_s=ttft, **changes) for i in range(4)])
        for number, ttft in enumerate(ttfts)
    ]


def arm(name: str, **changes: Any) -> ArmFacts:
    whole = ArmFacts(
        name=name, kind="started", face="grpc", model="m", settings=SETTINGS, ready_s=8.0
    )
    return replace(whole, **changes)


def result(
    measurements: Sequence[Measurement], arms: Sequence[ArmFacts] = (), **changes: Any
) -> CompareResult:
    """Arms `1P1D` and `2A`, unless others are given; ratios are to `2A`."""
    whole = CompareResult(
        created="2026-01-02T03:04:05+00:00",
        trace={"name": "chat"},
        settings={"rate_per_s": 1.0, "rounds": 3, "requests": 4, "scale_lengths": "1/4"},
        host={"cpu": "a processor", "cores": 8, "memory_bytes": 1 << 34},
        slo_s={"ttft": 0.25, "tpot": 0.06},
        baseline="2A",
        arms=tuple(arms) or (arm("1P1D"), arm("2A")),
        measurements=tuple(measurements),
    )
    return replace(whole, **changes)
