"""The table of metrics, its document, and what collectors show of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kv_transfer.protocol.driver import TransferCounters
from pdserve.config import SloConfig
from pdserve.observe.metrics import METRICS, as_markdown
from pdserve.types import Receipt, Usage
from router.metrics import RouterMetrics

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_the_document_is_what_the_table_says() -> None:
    path = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert path.read_text(encoding="utf-8") == as_markdown(), "run `make docs`"


def test_the_table_has_every_total_of_kv_transfers() -> None:
    for field in fields(TransferCounters):
        name = field.name.removesuffix("_s") + ("_seconds" if field.name.endswith("_s") else "")
        assert f"worker_kv_{name}" in METRICS


def answered(metrics: RouterMetrics, *, ttft_s: float, trace_id: str = "") -> None:
    metrics.answered(
        "demo",
        "",
        Usage(3, 5, 0),
        Receipt(),
        resumed=0,
        longest=5,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 4.0,
        trace_id=trace_id,
    )


def test_buckets_name_the_last_trace_to_who_reads_openmetrics() -> None:
    metrics = RouterMetrics(SloConfig())
    answered(metrics, ttft_s=0.2, trace_id=TRACE)
    answered(metrics, ttft_s=0.7)
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    ttft = families["pdserve_time_to_first_token_seconds"]
    exemplars = {s.labels["le"]: s.exemplar for s in ttft.samples if s.exemplar is not None}
    assert [*exemplars] == ["0.25"]
    assert exemplars["0.25"].labels == {"trace_id": TRACE}


def test_answers_are_counted_against_the_targets() -> None:
    metrics = RouterMetrics(SloConfig(ttft_s=0.5, tpot_s=0.1))
    for ttft_s in (0.2, 0.3, 0.7):
        answered(metrics, ttft_s=ttft_s)
    lines = metrics.render()[0].decode().splitlines()
    counted = [line for line in lines if line.startswith("pdserve_slo_requests_total{")]
    assert counted == [
        'pdserve_slo_requests_total{met="yes",model="demo",slo="ttft"} 2.0',
        'pdserve_slo_requests_total{met="no",model="demo",slo="tpot"} 3.0',
        'pdserve_slo_requests_total{met="no",model="demo",slo="ttft"} 1.0',
    ]
