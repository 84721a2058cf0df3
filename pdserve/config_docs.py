"""The configuration as people read it: a commented YAML file and docs/configuration.md.

`python -m pdserve.config_docs` writes the latter anew.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pdserve.config import Config
from pdserve.config_schema import KeyInfo, item_sections, keys, sections, to_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

DOC_PATH = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_INTRO = """\
# Configuration

One YAML file serves `pdserve up`, `pdserve router` and `pdserve worker`: each reads its own section
(`--config FILE`). `--set KEY=VALUE` sets any key on the command line, over the file, as do the
options named in `--help`. Unknown keys, wrong types and values out of bounds are refused with the
key's name. `pdserve config` prints a file with every key and its default.
"""


def as_yaml(config: Config | None = None) -> str:
    """A configuration file with every key, each under its sentence; at the defaults unless told."""
    values = to_mapping(config or Config())
    lines: list[str] = []
    for name, cls, doc in sections(Config):
        lines += ["", *_comment(doc, ""), f"{name}:", *_yaml_section(cls, values[name], "  ")]
    return "\n".join(lines[1:]) + "\n"


def _yaml_section(cls: type[object], values: Any, indent: str) -> Iterator[str]:
    for info in keys(cls):
        yield from _comment(_sentence(info), indent)
        yield f"{indent}{info.name}: {_flow(values[info.name])}"
    for name, nested, doc in sections(cls):
        yield from _comment(doc, indent)
        yield f"{indent}{name}:"
        yield from _yaml_section(nested, values[name], indent + "  ")


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, 100, initial_indent=prefix, subsequent_indent=prefix)


def as_markdown() -> str:
    """The text of docs/configuration.md."""
    parts = [_INTRO]
    for name, cls, doc in sections(Config):
        parts += [f"## `{name}`\n", f"{doc}\n", _table(cls, name)]
    return "\n".join(parts)


def _table(cls: type[object], at: str) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += _rows(cls, at)
    return "\n".join(rows) + "\n"


def _rows(cls: type[object], at: str) -> Iterator[str]:
    for info in keys(cls):
        cells = (f"`{at}.{info.name}`", info.type_name, f"`{_flow(info.default)}`", _sentence(info))
        yield f"| {' | '.join(cells)} |"
    for name, item in item_sections(cls):
        yield from _rows(item, f"{at}.{name}[]")
    for name, nested, _ in sections(cls):
        yield from _rows(nested, f"{at}.{name}")


def _sentence(info: KeyInfo) -> str:
    return f"{info.doc} One of: {', '.join(info.choices)}." if info.choices else info.doc


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


if __name__ == "__main__":
    DOC_PATH.write_text(as_markdown(), encoding="utf-8")
