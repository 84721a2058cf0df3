"""SVG and HTML elements as text, everything escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """One element. Children that are not :class:`Markup` are escaped; attributes of None are left
    out, ``_`` in their names is ``-``, and a trailing one (``class_``) is dropped."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(x if isinstance(x, Markup) else escape(x, quote=False) for x in children)
    return Markup(f"<{name}{given}>{inside}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    """Elements one after the other."""
    return Markup("".join(parts))


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
