"""Counts: as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

from router.counts import Counts


def test_counts_read_as_the_librarys_own_do() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("pdserve_asked", "Asked.", ("model", "outcome"))
    ours.register(counts)
    counter = Counter("pdserve_asked", "Asked.", ["model", "outcome"], registry=theirs)
    for labels, by in ((("m", "stop"), 1.0), (("m", "length"), 2.5), (("m", "stop"), 3.0)):
        counts.of(*labels).inc(by)
        counter.labels(*labels).inc(by)
    said = [x for x in generate_latest(theirs).decode().splitlines() if "_created" not in x]
    assert sorted(generate_latest(ours).decode().splitlines()) == sorted(said)
