"""The version of a release stands in one place, and what must repeat it agrees."""

from __future__ import annotations

import re
import tomllib
from datetime import date

from packaging.version import Version

from pdserve import __version__
from tests.support.commands import ROOT

IMAGE = re.compile(r'pdserve-(?:router|worker|worker-cpu)(?::|, newTag: ")(\d[\w.]*)')
TAGGED = ("kubernetes/base/kustomization.yaml", "helm/pdserve/values.yaml")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_package_takes_its_version_from_the_code() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pdserve.__version__"}


def test_tags_of_images_are_the_version() -> None:
    paths = [ROOT / "docs/deploy.md", *(ROOT / "deploy").rglob("*.yaml")]
    found = {str(x.relative_to(ROOT)): set(IMAGE.findall(x.read_text("utf-8"))) for x in paths}
    tagged = {path: tags for path, tags in found.items() if tags}
    assert {"docs/deploy.md", *(f"deploy/{x}" for x in TAGGED)} <= tagged.keys()
    assert {path: tags for path, tags in tagged.items() if tags != {__version__}} == {}


def test_the_changelog_has_an_entry_for_the_version() -> None:
    """Assert that the changelog keeps the form of keepachangelog.com: newest first, with dates."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    first, *released = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    entries = [re.fullmatch(r"\[(.+)\] - (\d{4}-\d\d-\d\d)", x) for x in released]
    dated = [(Version(x[1]), date.fromisoformat(x[2])) for x in entries if x is not None]
    assert len(dated) == len(released)
    assert dated == sorted(dated, reverse=True)
    assert dated[0][0] == Version(__version__)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= KINDS
