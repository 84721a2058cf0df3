"""The keys of the configuration, read from the schema: for options, errors and documentation."""

from __future__ import annotations

import functools
import typing
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from pdserve.config.schema import Config

if TYPE_CHECKING:
    from collections.abc import Iterator


class Key(NamedTuple):
    """One key. `kind` is the type of its value, or of the items of a list; `default` is as YAML
    loads it."""

    dotted: str
    kind: Any
    is_list: bool
    default: Any
    description: str
    choices: tuple[str, ...]


def _bare(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


def _description(annotation: Any) -> str:
    """Return the text of `about` of a key; that of a section may be the first paragraph of its
    class."""
    texts = [x.description for x in getattr(annotation, "__metadata__", ()) if x.description]
    if not texts and is_section(annotation):
        texts = [" ".join((annotation.__doc__ or "").partition("\n\n")[0].split())]
    return "".join(texts)


# Each command of `pdserve` reads all keys for its options; to read the schema takes 20 ms.
@functools.cache
def section_keys(cls: Any) -> tuple[Key, ...]:
    """Return the keys and subsections of one section."""
    keys = []
    hints = typing.get_type_hints(cls, include_extras=True)
    for spec in msgspec.structs.fields(cls):
        annotation = hints[spec.name]
        hint = _bare(annotation)
        is_list = typing.get_origin(hint) is tuple
        kind = _bare(typing.get_args(hint)[0]) if is_list else hint
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices = tuple(kind)
        default = {} if spec.default is msgspec.NODEFAULT else msgspec.to_builtins(spec.default)
        keys.append(Key(spec.name, kind, is_list, default, _description(annotation), choices))
    return tuple(keys)


def all_keys(cls: Any = Config, at: str = "") -> Iterator[Key]:
    """Yield every key below `cls`; those of list items as `name[].key`."""
    for key in section_keys(cls):
        dotted = f"{at}{key.dotted}"
        if key.is_list or not is_section(key.kind):
            yield key._replace(dotted=dotted)
        if is_section(key.kind):
            yield from all_keys(key.kind, f"{dotted}[]." if key.is_list else f"{dotted}.")
