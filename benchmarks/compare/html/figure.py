"""A plot with its caption and the key to its colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.plot.svg import Markup, join, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.result import CompareResult

ARM_COLOURS = 6


def arm_kind(result: CompareResult, name: str) -> str:
    """The CSS class of an arm's marks."""
    return f"arm{[arm.name for arm in result.arms].index(name) % ARM_COLOURS}"


def arm_key(result: CompareResult) -> list[tuple[str, str]]:
    """(CSS class, name) of every arm."""
    return [(arm_kind(result, arm.name), arm.name) for arm in result.arms]


def figure(
    title: str, svg: Markup, key: Sequence[tuple[str, str]], *, about: str = "", wide: bool = False
) -> Markup:
    """A titled picture; ``about`` says what to see in it."""
    entries = [tag("span", tag("i", "", class_=kind), name) for kind, name in key]
    parts = [tag("h3", title), tag("p", join(entries), class_="key"), svg]
    if about:
        parts.append(tag("figcaption", about))
    return tag("figure", *parts, class_="wide" if wide else None)


def nothing(title: str, why: str) -> Markup:
    """In place of a picture, why there is none."""
    return tag("figure", tag("h3", title), tag("p", why, class_="none"))


def section(name: str, *figures: Markup) -> Markup:
    """A heading and figures side by side."""
    return tag("section", tag("h2", name), tag("div", *figures, class_="figures"))
