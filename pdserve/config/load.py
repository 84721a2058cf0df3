"""Read a configuration: a YAML file with changes by dotted key, checked against the schema."""

from __future__ import annotations

import re
import typing
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import yaml
from msgspec import Struct

from pdserve.config.keys import all_keys
from pdserve.config.schema import Config, refuse
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")


def load_config(path: Path | None, changes: Mapping[str, object]) -> Config:
    """Return the file at `path`, or the defaults, with `changes` (by dotted key) applied. Raises
    ConfigError."""
    return parse(Config, overlay({} if path is None else read_file(path), changes))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key written twice. Plain YAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if isinstance(name, Hashable) and name in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{name}: is written twice (line {line})", field=str(name))
            if isinstance(name, Hashable):  # the base class refuses others
                seen.add(name)
        return typing.cast("dict[Any, Any]", super().construct_mapping(node, deep))


def read_yaml(text: str, source: str) -> dict[str, object]:
    """Return the mapping in `text`. Raises ConfigError."""
    try:
        loaded = yaml.load(text, _StrictLoader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a mapping of keys, not {type(loaded).__name__}")
    return loaded


def read_file(path: Path) -> dict[str, object]:
    try:
        return read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error


def overlay(raw: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of `raw` with each dotted key of `changes` set."""
    result = dict(raw)
    for dotted, value in changes.items():
        head, _, rest = dotted.partition(".")
        inner = result.get(head, {})
        if rest and not isinstance(inner, Mapping):
            refuse(head, f"must be a mapping, not {inner!r}")
        result[head] = overlay(typing.cast("Any", inner), {rest: value}) if rest else value
    return result


def to_mapping(section: Struct) -> dict[str, object]:
    """Return the section as plain values, which `parse` reads back."""
    return typing.cast("dict[str, object]", msgspec.json.decode(msgspec.json.encode(section)))


def parse(cls: type[_T], raw: object) -> _T:
    """Return `raw` as the section `cls`. Raises ConfigError with the dotted key."""
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        dotted = path.rpartition("$")[2].strip("`.")
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            reason = cause.message.removeprefix(f"{cause.field}: ")
            refuse(f"{dotted}.{cause.field}".strip("."), reason)
        known = {key.dotted: key for key in all_keys(cls)}
        general = re.sub(r"\[[^]]*\]", "[]", dotted)
        if unknown := re.match(r"Object contains unknown field `(.*)`", text):
            inside = f"{general}." if general else ""
            names = [x.removeprefix(inside) for x in known if x.startswith(inside)]
            keys = ", ".join(dict.fromkeys(re.split(r"\W", x)[0] for x in names))
            refuse(f"{dotted}.{unknown[1]}".strip("."), f"unknown key; keys are {keys}")
        key = known.get(general) or known.get(general.removesuffix("[]"))
        choices = f"; choose one of {', '.join(key.choices)}" if key and key.choices else ""
        refuse(dotted, f"{text[0].lower()}{text[1:]}{choices}")
