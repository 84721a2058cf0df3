"""Determines which prefill and decode workers can exchange KV, and why others cannot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.types import KvEndpoint, WorkerInfo

# (compatibility key, transports). Workers of equal kind can exchange KV with the same workers.
KvKind = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A prefill and a decode worker of one model that cannot exchange KV, with the reason."""

    prefill: WorkerInfo
    decode: WorkerInfo
    reason: str


def kind_of(worker: WorkerInfo) -> KvKind:
    """Return the kind of a worker. The kind of a worker without KV matches no other kind."""
    return ("", ()) if worker.kv is None else (worker.kv.compatibility, worker.kv.transports)


def exchange(prefill: KvKind, decode: KvKind) -> bool:
    """Return True if workers of these kinds can exchange KV."""
    return prefill[0] == decode[0] and not set(prefill[1]).isdisjoint(decode[1])


def unpaired(workers: Iterable[WorkerInfo]) -> Iterator[Unpaired]:
    """Yield each pair of a prefill and a decode worker of one model that cannot exchange KV."""
    known = list(workers)
    prefills, decodes = ([x for x in known if x.role is r] for r in (Role.PREFILL, Role.DECODE))
    for prefill, decode in itertools.product(prefills, decodes):
        same_model = decode.model.name == prefill.model.name
        if same_model and (found := list(_differences(prefill.kv, decode.kv))):
            ours, theirs = prefill.worker_id, decode.worker_id
            reasons = [f"{name}: {x} on {ours}, {y} on {theirs}" for name, x, y in found]
            yield Unpaired(prefill, decode, "; ".join(reasons))


def _differences(
    prefill: KvEndpoint | None, decode: KvEndpoint | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, prefill's value, decode's value) of each property that differs."""
    if prefill is None or decode is None:
        ours, theirs = ("an endpoint" if x else "no endpoint" for x in (prefill, decode))
        yield "kv", ours, theirs
        return
    if prefill.compatibility != decode.compatibility:
        mine, other = prefill.layout, decode.layout
        differing = [x for x in {**mine, **other} if mine.get(x) != other.get(x)]
        for name in differing:
            yield name, mine.get(name, "none"), other.get(name, "none")
        if not differing:
            yield "compatibility", prefill.compatibility, decode.compatibility
    if set(prefill.transports).isdisjoint(decode.transports):
        ours, theirs = ("+".join(x.transports) or "none" for x in (prefill, decode))
        yield "transports", ours, theirs
