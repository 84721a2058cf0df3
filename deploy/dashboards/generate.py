"""Generate the Grafana dashboards and the Prometheus rules in this directory: `make docs`.

The sources are panels.yaml and rules_source.yaml. An expression with a metric that is not in the
table of `pdserve/observe/metrics.py` is an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from pdserve.observe.metrics import METRICS, Kind

HERE = Path(__file__).resolve().parent
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
_RATE_OF_BUCKETS = 'sum by (le) (rate({}_bucket{{model=~"$model"}}[$__rate_interval]))'


def _read(name: str) -> Any:
    return yaml.safe_load((HERE / name).read_text(encoding="utf-8"))


DASHBOARDS: dict[str, Any] = _read("panels.yaml")
ALERTS: list[Any] = _read("rules_source.yaml")


def check(expr: str) -> str:
    """Return `expr`. Raises ValueError if it names a metric that is not in the table."""
    unknown = set(re.findall(r"pdserve_\w+", expr)) - _SHOWN
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not in pdserve/observe/metrics.py: {expr}")
    return expr


def queries(panel: dict[str, Any]) -> dict[str, str]:
    """Return the expressions of a panel by the legend of their series."""
    if "quantiles" in panel:
        buckets = _RATE_OF_BUCKETS.format(panel["quantiles"])
        return {f"p{q}": f"histogram_quantile({q / 100:g}, {buckets})" for q in (50, 99)}
    found: dict[str, str] = panel["queries"]
    return found


def as_dashboard(name: str) -> str:
    """Return a dashboard as JSON for import into Grafana."""
    panels = DASHBOARDS[name]["panels"]
    built = (
        dashboard.Dashboard(f"pdserve: {DASHBOARDS[name]['title']}")
        .uid(f"pdserve-{name}")
        .tags(["pdserve"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    if any("$model" in expr for panel in panels for expr in queries(panel).values()):
        models = dashboard.QueryVariable("model").label("Model").datasource(_SOURCE)
        models = models.query("label_values(pdserve_workers, model)")
        models = models.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).include_all(True)
        built = built.with_variable(models.all_value(".*").multi(True))
    for panel in panels:
        graph = timeseries.Panel().title(panel["title"]).unit(panel["unit"])
        graph = graph.description(panel.get("text", "")).datasource(_SOURCE)
        graph = graph.height(_HEIGHT).span(_SPAN).min(0)
        for letter, (legend, expr) in zip("ABCD", queries(panel).items(), strict=False):
            query = prometheus.Dataquery().expr(check(expr)).legend_format(legend).ref_id(letter)
            graph = graph.with_target(query.exemplar("_bucket" in expr))
        built = built.with_panel(graph)
    found = json.loads(JSONEncoder(sort_keys=True).encode(built.build()))
    for variable in found["templating"]["list"]:
        for field in ("auto", "auto_count", "auto_min"):  # not in Grafana's schema
            del variable[field]
    return json.dumps(found, indent=1) + "\n"


def rules() -> dict[str, Any]:
    """Return the rules in Prometheus' format."""
    alerts = [
        {
            "alert": alert["alert"],
            "expr": check(alert["expr"]),
            "for": alert["for"],
            "labels": {"severity": alert["severity"]},
            "annotations": {"summary": alert["summary"], **_runbook(alert)},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "pdserve", "rules": alerts}]}


def rule_tests() -> dict[str, Any]:
    """Return tests of the rules for `promtool test rules`: for each alert one case in which it
    fires, and one in which it does not."""
    tests = []
    for alert in ALERTS:
        wanted = alert["test"]
        labels: dict[str, str] = wanted.get("labels", {})
        fired = {
            "exp_labels": labels | {"severity": alert["severity"]},
            "exp_annotations": {"summary": _filled(alert["summary"], labels), **_runbook(alert)},
        }
        for kind, alerts in (("fires", [fired]), ("healthy", [])):
            check(" ".join(wanted[kind]))
            case = {"eval_time": wanted["at"], "alertname": alert["alert"], "exp_alerts": alerts}
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": k, "values": v} for k, v in wanted[kind].items()],
                    "alert_rule_test": [case],
                }
            )
    return {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}


def _runbook(alert: dict[str, Any]) -> dict[str, str]:
    """Return the link to the alert's section, below the root of wherever a site shows docs/."""
    return {"runbook_url": f"docs/runbooks.md#{alert['alert'].lower()}"}


def _filled(summary: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], summary)


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
