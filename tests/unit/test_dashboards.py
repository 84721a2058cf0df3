"""Dashboards and alert rules are those that their tables make, and rules do what they say."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml

from tests.support.commands import run
from tests.support.dashboards import FOLDER, generate


def test_the_files_are_what_the_tables_make() -> None:
    for name, text in generate.generated().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run `make docs`"


def test_each_alert_links_to_its_runbook() -> None:
    text = (FOLDER.parents[1] / "docs/runbooks.md").read_text(encoding="utf-8")
    severities = dict(re.findall(r"^## (\w+)\n\n\*(\w+)\.\*", text, re.MULTILINE))
    (group,) = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    assert severities == {x["alert"]: x["labels"]["severity"].title() for x in group["rules"]}
    for rule in group["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, anchor) == ("docs/runbooks.md", rule["alert"].lower())


def test_a_metric_missing_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="pdserve_no_such_total"):
        generate.check("rate(pdserve_no_such_total[5m])")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_each_alert_fires_only_in_its_case() -> None:
    for command in ("check", "test"):
        name = "rules.yaml" if command == "check" else "rules_test.yaml"
        run("promtool", command, "rules", name, cwd=FOLDER)
