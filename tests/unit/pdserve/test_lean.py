"""Lean values are what their dataclass says: defaults, checks, equality, copies."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from pdserve.lean import lean

if TYPE_CHECKING:
    from collections.abc import Mapping


@lean
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    names: Mapping[str, int] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError(f"x is {self.x}")

    @property
    def total(self) -> int:
        return self.x + self.y


def test_a_lean_value_is_made_copied_and_compared_as_its_dataclass() -> None:
    point = Point(1)
    assert (point.x, point.y, point.names, point.total) == (1, 2, {}, 3)
    assert point.names is not Point(1).names
    assert repr(point) == "Point(x=1, y=2)"
    assert point == Point(1, y=2) != Point(1, 3)
    assert {point: 1}[Point(1)] == 1
    assert replace(point, y=5) == Point(1, 5)
    assert copy.copy(point) == pickle.loads(pickle.dumps(point)) == point


def test_a_lean_value_is_checked_at_its_birth() -> None:
    with pytest.raises(ValueError, match="x is -1"):
        Point(-1)
    with pytest.raises(ValueError, match="x is -1"):
        replace(Point(1), x=-1)
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]


def test_a_lean_value_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Point(1).z = 3  # type: ignore[attr-defined]
