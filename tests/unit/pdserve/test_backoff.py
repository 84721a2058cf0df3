"""Pauses between attempts that fail one after the other."""

from __future__ import annotations

from itertools import islice

from pdserve.net.backoff import backoff


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(backoff(1.0, 5.0), 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_jitter_shortens_each_pause_by_up_to_half() -> None:
    jittered = list(islice(backoff(1.0, 5.0, jitter=True), 100))
    for pause_s, longest_s in zip(jittered, backoff(1.0, 5.0), strict=False):
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(jittered[10:])) > 1
