"""Dashboards and alert rules are those that their tables make, and rules do what they say."""

from __future__ import annotations

import shutil

import pytest

from tests.dashboards import FOLDER, generate
from tests.up_process import run


def test_the_files_are_what_the_tables_make() -> None:
    for name, text in generate.generated().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run `make docs`"


def test_a_metric_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="pdserve_no_such_total"):
        generate.check("rate(pdserve_no_such_total[5m])")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_each_alert_fires_in_its_case_and_not_beside_it() -> None:
    for command in ("check", "test"):
        name = "rules.yaml" if command == "check" else "rules_test.yaml"
        run("promtool", command, "rules", name, cwd=FOLDER)
