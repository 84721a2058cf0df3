"""Sphinx configuration of the documentation's site: `make site`. Sources are relative to the
repository's root, so links between README.md, docs/ and the code are those of the repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pdserve import __version__  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# In a newcomer's order. Pages that are not here follow under Project.
NAVIGATION = {
    "First steps": ("tutorial", "models", "clients", "console", "migrate"),
    "How it works": (
        "architecture",
        "scheduling",
        "places",
        "regions",
        "guards",
        "model-tiers",
        "kv_transfer",
        "failures",
        "audit",
        "vllm",
    ),
    "Operate": ("deploy", "operations", "capsules", "runbooks", "gpu"),
    "Measure": ("benchmarks", "scale", "verify"),
    "Reference": ("api", "grpc", "site/client", "configuration", "metrics", "site/extend"),
}

project = "pdserve"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/site/*.md"]
exclude_patterns = [".*", "build", "dist", "tests"]
highlight_language = "text"
myst_heading_anchors = 4  # anchors of headings are GitHub's

html_theme = "furo"
html_title = f"pdserve {release}"
html_extra_path = ["extra"]
html_use_index = False
html_domain_indices = False
html_copy_source = False
html_show_copyright = False

# In docstrings, as in Markdown, `x` is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the first page. GitHub would show it as code in README.md."""
    if page != app.config.root_doc:
        return
    sections = {title: [f"docs/{x}" for x in names] for title, names in NAVIGATION.items()}
    known = {page, *(x for pages in sections.values() for x in pages)}
    found = [
        x.relative_to(ROOT).with_suffix("") for x in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    ]
    sections["Project"] = sorted({x.as_posix() for x in found} - known)
    for title, pages in sections.items():
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def _parseable(*event: Any) -> tuple[str, str] | None:
    """Return a signature that Sphinx can split at its commas: `<factory>` is no expression."""
    signature, returns = event[-2:]
    return (signature.replace("<factory>", "..."), returns) if signature else None


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_navigation)
    app.connect("autodoc-process-signature", _parseable)
