"""Releases: the last first, each once, and all of them whatever one of them does."""

from __future__ import annotations

import pytest

from router.releases import Releases


def test_the_last_comes_first_and_each_once() -> None:
    made: list[int] = []
    releases = Releases()
    for i in range(3):
        releases.callback(made.append, i)
    releases.close()
    releases.close()
    assert made == [2, 1, 0]


def test_what_one_raises_keeps_no_other_from_being_made() -> None:
    made: list[int] = []
    releases = Releases()
    releases.callback(made.append, 0)
    releases.callback([].pop)
    releases.callback(made.append, 2)
    with pytest.raises(IndexError):
        releases.close()
    assert made == [2, 0]


def test_what_is_registered_while_they_are_made_is_made_too() -> None:
    made: list[int] = []
    releases = Releases()
    releases.callback(releases.callback, made.append, 1)
    releases.close()
    assert made == [1]
