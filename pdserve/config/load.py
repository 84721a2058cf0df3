"""Read a configuration: a YAML file with changes by dotted key, checked against the schema."""

from __future__ import annotations

import logging
import re
import typing
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import yaml
from msgspec import Struct

from pdserve.config.fields import refuse
from pdserve.config.keys import all_keys
from pdserve.config.renames import REMOVED, RENAMED, current_name, is_old
from pdserve.config.schema import Config
from pdserve.errors import ConfigError
from pdserve.suggestions import closest

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def load_config(path: Path | None, changes: Mapping[str, object]) -> Config:
    """Return the file at `path`, or the defaults, with `changes` (by dotted key) applied. Raises
    ConfigError."""
    raw = {} if path is None else with_current_names(read_file(path))
    # A change may be a whole section, with old names in it.
    return parse(Config, with_current_names(overlay(raw, changes)))


def with_current_names(raw: Mapping[str, object]) -> dict[str, Any]:
    """Return a file's keys with old names replaced. Raises ConfigError for a key that is set by
    both names."""
    result: dict[str, Any] = dict(raw)
    for old, new in RENAMED.items():
        value = _value_at(result, old)
        if value is not None and is_old(old, value):
            _report(old, new, is_twice=_value_at(result, new) is not None)
            result = overlay(_without(result, old), {new: value})
    return result


def current_changes(changes: Mapping[str, object]) -> dict[str, object]:
    """Return changes by dotted key with old names replaced. Raises ConfigError for a key that is
    set by both names."""
    result: dict[str, object] = {}
    for dotted, value in changes.items():
        name = current_name(dotted, value)
        if name != dotted:
            _report(dotted, name, is_twice=name in changes)
        result[name] = value
    return result


def _report(old: str, new: str, *, is_twice: bool) -> None:
    if is_twice:
        refuse(old, f"is the old name of {new}, which is set too: remove it")
    logger.warning("%s is now %s; the next version refuses the old name", old, new)


def _value_at(raw: object, dotted: str) -> object:
    """Return the value of a key, or None if it is not set."""
    for name in dotted.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


def _without(raw: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    """Return a copy of `raw` without a key, and without sections that are then empty."""
    head, _, rest = dotted.partition(".")
    inner = _without(raw[head], rest) if rest else {}
    return {key: x for key, x in raw.items() if key != head} | ({head: inner} if inner else {})


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
    result: dict[str, Any] = dict(raw)
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
            if unknown[1] in REMOVED:
                refuse(f"{dotted}.{unknown[1]}".strip("."), REMOVED[unknown[1]])
            inside = f"{general}." if general else ""
            names = [x.removeprefix(inside) for x in known if x.startswith(inside)]
            keys = dict.fromkeys(re.split(r"\W", x)[0] for x in names)
            old = [x.removeprefix(inside) for x in RENAMED if x.startswith(inside)]
            close = closest(unknown[1], [*old, *keys])
            close = RENAMED.get(inside + close, close).removeprefix(inside)
            hint = f"; did you mean {close}?" if close else ""
            reason = f"unknown key; keys are {', '.join(keys)}{hint}"
            refuse(f"{dotted}.{unknown[1]}".strip("."), reason)
        key = known.get(general) or known.get(general.removesuffix("[]"))
        choices = f"; choose one of {', '.join(key.choices)}" if key and key.choices else ""
        refuse(dotted, f"{text[0].lower()}{text[1:]}{choices}")
