"""The configuration as a commented YAML file, for docs/configuration.md and `pdserve config`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pdserve.config.keys import all_keys, is_section, section_keys
from pdserve.config.load import to_mapping
from pdserve.config.schema import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

_YAML_END = "...\n"


def as_yaml(config: Config | None = None) -> str:
    """Return a configuration file with every key under its description."""
    return "\n".join(_yaml(Config, to_mapping(config or Config()), "")) + "\n"


def _yaml(cls: Any, values: Any, indent: str) -> Iterator[str]:
    # Sections stand behind the plain keys.
    for key in sorted(section_keys(cls), key=lambda x: is_section(x.kind) and not x.is_list):
        text = key.description + (f" One of: {', '.join(key.choices)}." if key.choices else "")
        prefix = f"{indent}# "
        yield from textwrap.wrap(text, 100, initial_indent=prefix, subsequent_indent=prefix)
        if key.is_list and is_section(key.kind):
            yield from (f"{prefix}- {x.dotted}: {x.description}" for x in section_keys(key.kind))
        value = values[key.dotted]
        if is_section(key.kind) and not key.is_list:
            yield f"{indent}{key.dotted}:"
            yield from _yaml(key.kind, value, indent + "  ")
        else:
            flow = yaml.safe_dump(value, default_flow_style=True, width=1000)
            yield f"{indent}{key.dotted}: {flow.removesuffix(_YAML_END).strip()}"


_INTRO = """\
# Configuration

One YAML file (`--config FILE`) serves `pdserve up`, `pdserve router` and `pdserve worker`; each
reads its own section. `--set KEY=VALUE` sets any key on the command line and overrides the file,
such as `--set router.lease_s=3`. The options in `--help` do the same for the most common keys.
Unknown keys, wrong types and values out of bounds are refused with the name of the key.
`pdserve config` prints all keys as a file, with the values that it was given, and
`pdserve config --check` only what is wrong with them.
"""


def as_markdown() -> str:
    """Return the text of docs/configuration.md: a heading a section, an anchor a key."""
    lines, section = [_INTRO], ""
    # Sections stand behind the plain keys of the section around them.
    for key in sorted(all_keys(), key=lambda x: x.dotted.rpartition(".")[0].split(".")):
        head, _, name = key.dotted.rpartition(".")
        if head != section:
            section = head
            lines.append(f"\n## {head}\n")
        default = yaml.safe_dump(key.default, default_flow_style=True, width=1000)
        text = key.description + (f" One of: {', '.join(key.choices)}." if key.choices else "")
        value = default.removesuffix(_YAML_END).strip()
        lines.append(f'- <a id="{key.dotted}"></a>**{name}** (default `{value}`): {text}')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    path.write_text(as_markdown(), encoding="utf-8")
