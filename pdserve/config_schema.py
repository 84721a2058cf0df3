"""Frozen dataclasses as a configuration schema: read, overlay, describe. Knows no key by name.

A field is declared with `key(default, "One sentence.", ...)`; a nested dataclass is a section.
Types understood: str, int, float, bool, str enums, tuples of one type, mappings with string keys.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

Value = TypeVar("Value")
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a value must satisfy beside its type; for a tuple, each of its items."""

    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    not_empty: bool = False

    def reason_against(self, value: object) -> str | None:
        """Why `value` is refused, or None."""
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        if self.not_empty and not value:
            return "must not be empty"
        if isinstance(value, int | float):
            # A NaN fails both comparisons, so the test is for being inside.
            if self.minimum is not None and not value >= self.minimum:
                return f"must be at least {self.minimum:g}, not {value}"
            if self.maximum is not None and not value <= self.maximum:
                return f"must be at most {self.maximum:g}, not {value}"
        return None


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key as documentation shows it. `default` is as YAML would load it."""

    name: str
    type_name: str
    default: object
    doc: str
    choices: tuple[str, ...]


def key(
    default: Value,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    not_empty: bool = False,
) -> Value:
    """A dataclass field with its sentence and its bounds; typed as its default, as `field` is."""
    bounds = Bounds(minimum, maximum, choices, not_empty)
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type[Section], doc: str) -> Section:
    """A field that holds a nested section, all defaults unless told otherwise."""
    return field(default_factory=cls, metadata={"doc": doc})


def check(config: object) -> None:
    """Call from `__post_init__`. Raises ConfigError naming the field, relative to its section."""
    for spec in _specs(config):
        bounds: Bounds | None = spec.metadata.get("bounds")
        if bounds is None:
            continue
        value = getattr(config, spec.name)
        items = value if isinstance(value, tuple) else (value,)
        if bounds.not_empty and not value:
            refuse(spec.name, "must not be empty")
        for item in items:
            reason = bounds.reason_against(item)
            if reason is not None:
                refuse(spec.name, reason)


def refuse(dotted: str, reason: str) -> typing.NoReturn:
    """Raise the one error of this module."""
    raise ConfigError(f"{dotted}: {reason}" if dotted else reason, field=dotted)


def parse(cls: type[Section], raw: Mapping[str, object], at: str = "") -> Section:
    """The section `cls` from loaded YAML. Raises ConfigError with the dotted key at fault."""
    specs = {spec.name: spec for spec in _specs(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in raw.items():
        dotted = _join(at, str(name))
        if name not in specs:
            refuse(dotted, f"is not a key here; keys are {', '.join(specs)}")
        values[name] = _convert(hints[name], value, dotted)
    try:
        return cls(**values)
    except ConfigError as error:
        # Sections know their own field names only.
        reason = error.message.removeprefix(f"{error.field}: ")
        refuse(_join(at, error.field), reason)


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at and name else at or name


def _convert(hint: Any, value: object, dotted: str) -> object:
    origin = typing.get_origin(hint)
    if is_dataclass(hint):
        return parse(typing.cast("type[object]", hint), _mapping(value, dotted), dotted)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            refuse(dotted, f"must be a list, not {_kind(value)}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, x, f"{dotted}[{i}]") for i, x in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        return dict(_mapping(value, dotted))
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            names = ", ".join(str(member.value) for member in hint)
            refuse(dotted, f"must be one of {names}, not {value!r}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int to Python, and never one to a reader of YAML.
    if type(value) is not hint:
        refuse(dotted, f"must be {_NAMES[hint]}, not {_kind(value)}")
    return value


def _mapping(value: object, dotted: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        refuse(dotted, f"must be a mapping, not {_kind(value)}")
    for name in value:
        if not isinstance(name, str):
            refuse(dotted, f"has the key {name!r}, which is not a string")
    return value


_NAMES: dict[object, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def _kind(value: object) -> str:
    if value is None:
        return "empty"
    return f"{_NAMES.get(type(value), f'a {type(value).__name__}')} ({value!r})"


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice; plain YAML takes the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if not isinstance(name, Hashable):
                continue  # the base class refuses it
            if name in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{name}: is written twice (line {line})", field=str(name))
            seen.add(name)
        return typing.cast("dict[Any, Any]", super().construct_mapping(node, deep))


def read_yaml(text: str, source: str) -> dict[str, object]:
    """The mapping in `text`; empty text is an empty mapping. Raises ConfigError."""
    try:
        loaded = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a mapping of keys, not {_kind(loaded)}")
    return loaded


def read_file(path: Path) -> dict[str, object]:
    """`read_yaml` of a file. Raises ConfigError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    return read_yaml(text, str(path))


def overlay(raw: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """A copy of `raw` with each dotted key of `changes` set."""
    result = dict(raw)
    for dotted, value in changes.items():
        head, _, rest = dotted.partition(".")
        if not rest:
            result[head] = value
            continue
        result[head] = overlay(_mapping(result.get(head, {}), head), {rest: value})
    return result


def to_mapping(config: object) -> dict[str, object]:
    """The section as plain values, such that `parse` gives it back."""
    return {spec.name: _plain(getattr(config, spec.name)) for spec in _specs(config)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


def keys(cls: type[object]) -> Iterator[KeyInfo]:
    """The section's own keys in order, nested sections left out."""
    hints = typing.get_type_hints(cls)
    for spec in _specs(cls):
        hint = hints[spec.name]
        if is_dataclass(hint):
            continue
        bounds: Bounds = spec.metadata.get("bounds", Bounds())
        default, doc = _plain(_default(spec)), spec.metadata["doc"]
        yield KeyInfo(spec.name, _type_name(hint), default, doc, _choices(hint, bounds))


def sections(cls: type[object]) -> Iterator[tuple[str, type[object], str]]:
    """Name, class and sentence of each nested section."""
    hints = typing.get_type_hints(cls)
    for spec in _specs(cls):
        if is_dataclass(hints[spec.name]):
            yield spec.name, hints[spec.name], spec.metadata["doc"]


def item_sections(cls: type[object]) -> Iterator[tuple[str, type[object]]]:
    """Name and item of each list of sections."""
    hints = typing.get_type_hints(cls)
    for spec in _specs(cls):
        items = typing.get_args(hints[spec.name])
        if items and is_dataclass(items[0]):
            yield spec.name, typing.cast("type[object]", items[0])


def _specs(config: object) -> tuple[Field[Any], ...]:
    """`fields`, of an instance or a class, without its demand to know which at type-check time."""
    return fields(typing.cast("Any", config))


def _default(spec: Field[Any]) -> object:
    return spec.default if spec.default_factory is MISSING else spec.default_factory()


def _choices(hint: Any, bounds: Bounds) -> tuple[str, ...]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(str(member.value) for member in hint)
    return bounds.choices


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    if origin is not None and not isinstance(hint, types.UnionType):
        return "mapping"
    if is_dataclass(hint):
        return "mapping"
    return {int: "integer", float: "number", bool: "boolean"}.get(hint, "string")
