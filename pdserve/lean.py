"""Values that are made by the dozen for every request."""

from __future__ import annotations

from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def lean(cls: type[T]) -> type[T]:
    """A frozen dataclass with the constructor of one that is not: its own sets each field by a
    call, and takes four times as long. That nobody changes a field is for mypy to see; at run time
    nothing refuses it any more."""
    check = getattr(cls, "__post_init__", None)
    made = make_dataclass(
        cls.__name__,
        [(each.name, each.type, _again(each)) for each in fields(cls)],  # type: ignore[arg-type]
        namespace={} if check is None else {"__post_init__": check},
    )
    cls.__init__ = made.__init__  # type: ignore[method-assign,misc]
    del cls.__setattr__, cls.__delattr__
    return cls


def _again(each: Any) -> Any:
    """A declared field, for another class."""
    given = {"init": each.init, "kw_only": each.kw_only}
    for name in ("default", "default_factory"):
        if getattr(each, name) is not MISSING:
            given[name] = getattr(each, name)
    return field(**given)
