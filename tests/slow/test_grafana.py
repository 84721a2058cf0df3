"""The dashboards are valid by Grafana's own schema: the types of its package @grafana/schema."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import jsonschema_rs
import pytest

from tests.support.commands import ROOT, run
from tests.support.dashboards import generate

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ROOT / "tests" / "clients" / "node_modules"
TO_SCHEMA = PACKAGES / ".bin" / "ts-json-schema-generator"
TYPES = PACKAGES / "@grafana" / "schema" / "dist" / "types" / "index.d.ts"


@pytest.mark.skipif(
    shutil.which("node") is None or not TO_SCHEMA.exists(),
    reason="needs Node, and the packages that `make test-tools` installs",
)
def test_grafana_takes_the_dashboards(tmp_path: Path) -> None:
    words = ["--path", TYPES, "--type", "Dashboard", "--expose", "none", "--no-type-check"]
    run(TO_SCHEMA, *words, "--out", tmp_path / "schema.json")
    schema = jsonschema_rs.validator_for(json.loads((tmp_path / "schema.json").read_text()))
    for name in generate.DASHBOARDS:
        found = json.loads(generate.as_dashboard(name))
        schema.validate(found)
        found["panels"][0]["titel"] = "a field that Grafana does not know"
        assert not schema.is_valid(found)
