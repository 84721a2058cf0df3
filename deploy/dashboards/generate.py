"""Write the Grafana dashboards and the Prometheus rules beside this file: `make docs`.

Every expression names metrics of the table in `pdserve/metrics.py`; what is not in it is refused.
Routers all see the same workers, so workers are counted with `max`, requests with `sum`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from pdserve.metrics import METRICS, Kind

HERE = Path(__file__).resolve().parent
# Share of requests that must meet a target, over a month.
OBJECTIVE = 0.99
_HEIGHT, _SPAN = 8, 12
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_SUFFIXES = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
_SHOWN = {
    f"pdserve_{spec.name}{suffix}" for spec in METRICS.values() for suffix in _SUFFIXES[spec.kind]
}


class Panel(NamedTuple):
    """A graph. `queries` are pairs of an expression and the legend of its series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


class Alert(NamedTuple):
    """An alert with its own tests: `series` that must fire it by minute `at`, and `healthy` ones
    that must not. Series are in the notation of promtool, one sample a minute."""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    series: dict[str, str]
    healthy: dict[str, str]
    labels: dict[str, str]
    at: str


def rate(metric: str, by: str, where: str = "") -> str:
    selector = f'{{model=~"$model"{where}}}'
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def quantiles(metric: str, *, by: str = "le") -> tuple[tuple[str, str], ...]:
    """Return the median and the 99th percentile of a histogram over all routers."""
    return tuple(
        (f"histogram_quantile({q}, {rate(f'{metric}_bucket', by)})", f"p{round(q * 100)}")
        for q in (0.5, 0.99)
    )


def largest(metric: str, by: str, where: str = '{model=~"$model"}') -> str:
    return f"max by ({by}) ({metric}{where})"


def worker_rate(metric: str) -> str:
    """Every router shows every worker's total: one of them counts."""
    inner = f'rate({metric}{{model=~"$model"}}[$__rate_interval])'
    return f"max by (role, worker) ({inner})"


_ATTAINED = (
    'sum by (slo) (rate(pdserve_slo_requests_total{model=~"$model", met="yes"}[$__rate_interval]))'
    ' / sum by (slo) (rate(pdserve_slo_requests_total{model=~"$model"}[$__rate_interval]))'
)
_MEAN = (
    'sum(rate({0}_sum{{model=~"$model"}}[$__rate_interval]))'
    ' / sum(rate({0}_count{{model=~"$model"}}[$__rate_interval]))'
)

_WASTE, _PREFILL, _DECODE = (f'kind="{kind}"' for kind in ("waste", "prefill", "decode"))
_ENERGY = "pdserve_energy_joules_total"


def _sum_rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def _cost(by: str, where: str = "") -> str:
    return _sum_rate("pdserve_cost_total", by, where)


def _of_token(metric: str) -> tuple[tuple[str, str], ...]:
    """Return what a token of a model takes of `metric`."""
    prompt = _sum_rate("pdserve_prompt_tokens_total", "model")
    generated = _sum_rate("pdserve_generation_tokens_total", "model")
    return (
        (f"{_sum_rate(metric, 'model', _PREFILL)} / {prompt}", "{{model}} prompt"),
        (f"{_sum_rate(metric, 'model', _DECODE)} / {generated}", "{{model}} generated"),
    )


DASHBOARDS: dict[str, tuple[Panel, ...]] = {
    "overview": (
        Panel(
            "Requests by outcome",
            "reqps",
            ((rate("pdserve_requests_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Targets met", "percentunit", ((_ATTAINED, "{{slo}}"),), "Share of answered requests."
        ),
        Panel("Time to first token", "s", quantiles("pdserve_time_to_first_token_seconds")),
        Panel("Time per output token", "s", quantiles("pdserve_time_per_output_token_seconds")),
        Panel(
            "Tokens",
            "short",
            (
                (rate("pdserve_prompt_tokens_total", "model"), "{{model}} prompt"),
                (rate("pdserve_cached_tokens_total", "model"), "{{model}} prompt, cached"),
                (rate("pdserve_generation_tokens_total", "model"), "{{model}} generated"),
            ),
            "Tokens a second.",
        ),
        Panel(
            "Requests in routers",
            "short",
            (
                ("sum(pdserve_requests_running)", "running"),
                ("sum(pdserve_requests_queued)", "queued"),
            ),
        ),
        Panel(
            "Workers", "short", ((largest("pdserve_workers", "role, state"), "{{role}} {{state}}"),)
        ),
        Panel("Refusals", "reqps", ((rate("pdserve_refusals_total", "reason"), "{{reason}}"),)),
    ),
    "phases": (
        Panel("Queue", "s", quantiles("pdserve_request_queue_seconds")),
        Panel("Prefill", "s", quantiles("pdserve_request_prefill_seconds")),
        Panel(
            "KV transfer after prefill ended",
            "s",
            quantiles("pdserve_kv_transfer_exposed_seconds"),
            "The part of the transfer that a client waits for.",
        ),
        Panel("Decode", "s", quantiles("pdserve_request_decode_seconds")),
        Panel("Time between steps", "s", quantiles("pdserve_inter_token_latency_seconds")),
        Panel("Whole request", "s", quantiles("pdserve_e2e_request_seconds")),
        Panel("Load by role", "percentunit", ((largest("pdserve_role_load", "role"), "{{role}}"),)),
        Panel(
            "Workers that the load asks for",
            "short",
            ((largest("pdserve_role_workers_wanted", "role"), "{{role}}"),),
        ),
        Panel(
            "Requests in engines",
            "short",
            (
                (largest("pdserve_worker_num_running_reqs", "worker"), "{{worker}} running"),
                (largest("pdserve_worker_num_waiting_reqs", "worker"), "{{worker}} waiting"),
            ),
        ),
        Panel(
            "KV cache used",
            "percentunit",
            ((largest("pdserve_worker_kv_cache_usage", "worker"), "{{worker}}"),),
        ),
        Panel(
            "Retries",
            "reqps",
            ((rate("pdserve_fallbacks_total", "step, reason"), "{{step}} {{reason}}"),),
        ),
        Panel(
            "Answers that continued elsewhere",
            "reqps",
            ((rate("pdserve_continuations_total", "from"), "{{from}}"),),
        ),
        Panel(
            "Predicted over actual TTFT",
            "short",
            ((_MEAN.format("pdserve_predicted_ttft_ratio"), "mean"),),
        ),
    ),
    "kv": (
        Panel(
            "KV moved for requests",
            "Bps",
            ((rate("pdserve_kv_transfer_bytes_total", "model"), "{{model}}"),),
        ),
        Panel("Duration of transfers", "s", quantiles("pdserve_kv_transfer_seconds")),
        Panel(
            "Received",
            "Bps",
            ((worker_rate("pdserve_worker_kv_received_bytes_total"), "{{worker}}"),),
        ),
        Panel(
            "Sent", "Bps", ((worker_rate("pdserve_worker_kv_pushed_bytes_total"), "{{worker}}"),)
        ),
        Panel(
            "Failures",
            "ops",
            (
                (worker_rate("pdserve_worker_kv_failures_total"), "{{worker}} failed"),
                (worker_rate("pdserve_worker_kv_receive_timeouts_total"), "{{worker}} too late"),
                (worker_rate("pdserve_worker_kv_digest_mismatches_total"), "{{worker}} damaged"),
                (worker_rate("pdserve_worker_kv_expired_leases_total"), "{{worker}} lease expired"),
            ),
        ),
        Panel(
            "Slower transport than preferred",
            "ops",
            ((worker_rate("pdserve_worker_kv_downgrades_total"), "{{worker}}"),),
        ),
        Panel("Pairs not used", "short", (("max(pdserve_kv_ejected_pairs)", "pairs"),)),
        Panel(
            "Links",
            "short",
            (
                (
                    largest("pdserve_worker_kv_links", "worker, transport"),
                    "{{worker}} {{transport}}",
                ),
            ),
        ),
        Panel(
            "Blocks pinned",
            "short",
            ((largest("pdserve_worker_kv_pinned_blocks", "worker"), "{{worker}}"),),
        ),
        Panel(
            "Blocks in the index of prefixes", "short", (("max(pdserve_prefix_blocks)", "blocks"),)
        ),
    ),
    "tenants": (
        Panel(
            "Tokens",
            "short",
            (
                (
                    "sum by (tenant, kind) (rate(pdserve_tenant_tokens_total[$__rate_interval]))",
                    "{{tenant}} {{kind}}",
                ),
            ),
            "Tokens a second.",
        ),
        Panel(
            "Answers",
            "reqps",
            (
                (
                    "sum by (tenant) (rate(pdserve_tenant_answers_total[$__rate_interval]))",
                    "{{tenant}}",
                ),
            ),
        ),
        Panel(
            "Refusals",
            "reqps",
            (
                (
                    (
                        "sum by (tenant, reason)"
                        " (rate(pdserve_tenant_refusals_total[$__rate_interval]))"
                    ),
                    "{{tenant}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Open requests",
            "short",
            (("sum by (tenant) (pdserve_tenant_requests_open)", "{{tenant}}"),),
        ),
        Panel(
            "Cost of tenants an hour",
            "short",
            ((f"3600 * {_sum_rate('pdserve_tenant_cost_total', 'tenant')}", "{{tenant}}"),),
        ),
        Panel(
            "Cost of workers an hour",
            "short",
            ((f"3600 * {_cost('role, kind')}", "{{role}} {{kind}}"),),
            "Idle time is not charged to tenants, and waste neither.",
        ),
        Panel(
            "Waste an hour by reason",
            "short",
            ((f"3600 * {_cost('role, reason', _WASTE)}", "{{role}} {{reason}}"),),
        ),
        Panel(
            "Cost of a million tokens",
            "short",
            tuple((f"1e6 * {expr}", legend) for expr, legend in _of_token("pdserve_cost_total")),
            "Without waste and idle time.",
        ),
        Panel(
            "Power by use",
            "watt",
            ((_sum_rate(_ENERGY, "role, kind"), "{{role}} {{kind}}"),),
            "Of the workers that have a counter of energy: NVML's or RAPL's.",
        ),
        Panel("Energy of a token", "joule", _of_token(_ENERGY), "Without waste and idle time."),
    ),
    "gpus": tuple(
        Panel(title, unit, ((expr, legend),))
        for title, unit, expr, legend in (
            ("Power", "watt", "pdserve_gpu_power_watts", "{{instance}} {{gpu}}"),
            (
                "Energy",
                "watt",
                "rate(pdserve_gpu_energy_joules_total[$__rate_interval])",
                "{{instance}} {{gpu}}",
            ),
            ("Kernels run", "percentunit", "pdserve_gpu_utilization_ratio", "{{instance}} {{gpu}}"),
            (
                "Memory",
                "percentunit",
                "pdserve_gpu_memory_used_bytes / pdserve_gpu_memory_bytes",
                "{{instance}} {{gpu}}",
            ),
            ("Temperature", "celsius", "pdserve_gpu_temperature_celsius", "{{instance}} {{gpu}}"),
            ("Clock", "hertz", "pdserve_gpu_clock_hertz", "{{instance}} {{gpu}}"),
            (
                "Clock held down",
                "short",
                "pdserve_gpu_throttled",
                "{{instance}} {{gpu}} {{reason}}",
            ),
            ("Out of service", "short", "pdserve_gpu_faulty", "{{instance}} {{gpu}} {{reason}}"),
            ("Last Xid error", "short", "pdserve_gpu_xid", "{{instance}} {{gpu}}"),
            (
                "Memory errors",
                "ops",
                "rate(pdserve_gpu_ecc_errors_total[$__rate_interval])",
                "{{instance}} {{gpu}}",
            ),
        )
    ),
}
_TITLES = {
    "overview": "overview",
    "phases": "phases of a request",
    "kv": "KV transfers",
    "tenants": "tenants and cost",
    "gpus": "GPUs",
}


def _burn(window: str) -> str:
    """Return the share of answers that missed a target, over the allowed share."""
    missed = f'sum by (model, slo) (rate(pdserve_slo_requests_total{{met="no"}}[{window}]))'
    every = f"sum by (model, slo) (rate(pdserve_slo_requests_total[{window}]))"
    return f"{missed} / {every} / {1 - OBJECTIVE:.2g}"


_WORKERS = 'pdserve_workers{model="m", role="decode", state="%s"}'
_SLO = 'pdserve_slo_requests_total{model="m", slo="ttft", met="%s"}'
_ANSWERS = {_SLO % "yes": "0+60x480", _SLO % "no": "0+0x480"}
_ADMITTED = "rate(pdserve_requests_total[5m])"
# A tenant over its own limits is not the service's fault.
_REFUSED = 'rate(pdserve_refusals_total{code=~"overloaded|unavailable", reason!~"tenant_.*"}[5m])'
_OF_MODEL = {"model": "m"}
_OF_ROLE = {"model": "m", "role": "decode"}

# The windows and factors of the SLO alerts are those of Google's SRE workbook, chapter 5: a page
# for 2 % of a month's budget in an hour, a ticket for 5 % in six.
ALERTS = (
    Alert(
        "PdserveSloBurnsFast",
        f"{_burn('1h')} > 14.4 and {_burn('5m')} > 14.4",
        "2m",
        "page",
        "{{ $labels.model }} misses its target for {{ $labels.slo }} 14 times as often as allowed",
        {_SLO % "yes": "0+40x480", _SLO % "no": "0+20x480"},
        _ANSWERS,
        {"model": "m", "slo": "ttft"},
        "70m",
    ),
    Alert(
        "PdserveSloBurnsSlowly",
        f"{_burn('6h')} > 6 and {_burn('30m')} > 6",
        "15m",
        "ticket",
        "{{ $labels.model }} misses its target for {{ $labels.slo }} 6 times as often as allowed",
        {_SLO % "yes": "0+55x480", _SLO % "no": "0+5x480"},
        _ANSWERS,
        {"model": "m", "slo": "ttft"},
        "400m",
    ),
    Alert(
        "PdserveNoReadyWorker",
        # A role counts if it had a ready worker within the hour. Its series may be gone.
        'max by (model, role) (max_over_time(pdserve_workers{state="ready"}[1h])) > 0'
        ' unless on (model, role) max by (model, role) (pdserve_workers{state="ready"}) > 0',
        "1m",
        "page",
        "{{ $labels.model }} has no ready {{ $labels.role }} worker",
        {_WORKERS % "ready": "2 2 0x20"},
        {_WORKERS % "ready": "2 2 1x20", _WORKERS % "lost": "0 0 1x20"},
        _OF_ROLE,
        "6m",
    ),
    Alert(
        "PdserveKvTransfersFail",
        "sum by (model, role) (max by (model, role, worker)"
        " (increase(pdserve_worker_kv_failures_total[10m]))) > 5",
        "5m",
        "ticket",
        "KV transfers of {{ $labels.role }} workers of {{ $labels.model }} fail",
        {'pdserve_worker_kv_failures_total{model="m", role="decode", worker="d"}': "0+3x30"},
        {'pdserve_worker_kv_failures_total{model="m", role="decode", worker="d"}': "0 0 1 1x30"},
        _OF_ROLE,
        "20m",
    ),
    Alert(
        "PdservePairEjected",
        "max(pdserve_kv_ejected_pairs) > 0",
        "5m",
        "ticket",
        "Pairs of workers are not used because KV between them failed: see pdserve status",
        {'pdserve_kv_ejected_pairs{instance="r"}': "1x20"},
        {'pdserve_kv_ejected_pairs{instance="r"}': "0 1 1 0x20"},
        {},
        "10m",
    ),
    Alert(
        "PdserveRefuses",
        f"sum by (model) ({_REFUSED}) / sum by (model) ({_REFUSED} or {_ADMITTED}) > 0.05",
        "5m",
        "page",
        "{{ $labels.model }} refuses more than 5 % of its requests",
        {
            'pdserve_refusals_total{model="m", code="overloaded", reason="queue_full"}': "0+20x30",
            'pdserve_requests_total{model="m", outcome="stop"}': "0+60x30",
        },
        {
            'pdserve_refusals_total{model="m", code="overloaded", reason="queue_full"}': "0+1x30",
            'pdserve_refusals_total{model="m", code="invalid_request", reason=""}': "0+60x30",
            'pdserve_requests_total{model="m", outcome="stop"}': "0+60x30",
        },
        _OF_MODEL,
        "15m",
    ),
    Alert(
        "PdserveGpuLost",
        "max by (instance, gpu, reason) (pdserve_gpu_faulty) > 0",
        "0m",
        "page",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is out of service: {{ $labels.reason }}",
        {'pdserve_gpu_faulty{instance="w", gpu="0", reason="GPU 0 is lost"}': "1x20"},
        {'pdserve_gpu_faulty{instance="w", gpu="0", reason=""}': "0x20"},
        {"instance": "w", "gpu": "0", "reason": "GPU 0 is lost"},
        "2m",
    ),
    Alert(
        "PdserveLeasesFlap",
        "sum by (model, role) (max by (model, role, state)"
        ' (changes(pdserve_workers{state="lost"}[30m]))) > 5',
        "0m",
        "ticket",
        "{{ $labels.role }} workers of {{ $labels.model }} are lost and come back, again and again",
        {_WORKERS % "lost": "0 1 0 1 0 1 0 1 0 1 0 1"},
        {_WORKERS % "lost": "0 1 1 1 1 1 1 0 0 0 0 0"},
        _OF_ROLE,
        "10m",
    ),
)


def check(expr: str) -> str:
    """Return `expr`. Raises ValueError if it names a metric that is not in the table."""
    unknown = set(re.findall(r"pdserve_\w+", expr)) - _SHOWN
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not in pdserve/metrics.py: {expr}")
    return expr


def as_dashboard(name: str) -> str:
    """Return a dashboard as JSON, to import into Grafana."""
    built = (
        dashboard.Dashboard(f"pdserve: {_TITLES[name]}")
        .uid(f"pdserve-{name}")
        .tags(["pdserve"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    if name in ("overview", "phases", "kv"):
        models = dashboard.QueryVariable("model").label("Model").datasource(_SOURCE)
        models = models.query("label_values(pdserve_workers, model)")
        models = models.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).include_all(True)
        built = built.with_variable(models.all_value(".*").multi(True))
    for panel in DASHBOARDS[name]:
        graph = timeseries.Panel().title(panel.title).description(panel.text).unit(panel.unit)
        graph = graph.datasource(_SOURCE).height(_HEIGHT).span(_SPAN).min(0)
        for letter, (expr, legend) in zip("ABCD", panel.queries, strict=False):
            query = prometheus.Dataquery().expr(check(expr)).legend_format(legend).ref_id(letter)
            graph = graph.with_target(query.exemplar("_bucket" in expr))
        built = built.with_panel(graph)
    found = json.loads(JSONEncoder(sort_keys=True).encode(built.build()))
    for variable in found["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):  # the library's; Grafana's schema has none
            del variable[name]
    return json.dumps(found, indent=1) + "\n"


def rules() -> dict[str, Any]:
    """Return the rules as Prometheus reads them."""
    alerts = [
        {
            "alert": alert.name,
            "expr": check(alert.expr),
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "pdserve", "rules": alerts}]}


def rule_tests() -> dict[str, Any]:
    """Return the rules' tests as `promtool test rules` reads them: for each alert a case in which
    it fires, and one in which it does not."""
    tests = []
    for alert in ALERTS:
        for series, fires in ((alert.series, True), (alert.healthy, False)):
            check(" ".join(series))
            fired = {"exp_labels": alert.labels | {"severity": alert.severity}}
            case: dict[str, Any] = {
                "eval_time": alert.at,
                "alertname": alert.name,
                "exp_alerts": [],
            }
            if fires:
                case["exp_alerts"] = [fired | {"exp_annotations": {"summary": _filled(alert)}}]
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": k, "values": v} for k, v in series.items()],
                    "alert_rule_test": [case],
                }
            )
    return {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}


def _filled(alert: Alert) -> str:
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: alert.labels[found[1]], alert.summary)


def generated() -> dict[str, str]:
    """Return the text of each file by its name."""
    texts = {f"{name}.json": as_dashboard(name) for name in DASHBOARDS}
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pdserve"},
        "spec": rules(),
    }
    for name, content in (
        ("rules.yaml", rules()),
        ("rules_test.yaml", rule_tests()),
        ("prometheus_rule.yaml", rule),
    ):
        texts[name] = yaml.safe_dump(content, sort_keys=False, width=100)
    return texts


if __name__ == "__main__":
    for name, text in generated().items():
        (HERE / name).write_text(text, encoding="utf-8")
