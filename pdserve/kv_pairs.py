"""Which prefill and decode workers can exchange KV, and why others cannot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.types import KvEndpoint, WorkerInfo

# Compatibility and transports. Workers of equal kinds exchange KV with the same workers.
KvKind = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A property that differs between two workers."""

    field: str
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Two workers of one model that cannot exchange KV. `differences` is never empty."""

    prefill: WorkerInfo
    decode: WorkerInfo
    differences: tuple[Difference, ...]

    @property
    def reason(self) -> str:
        ours, theirs = self.prefill.worker_id, self.decode.worker_id
        return "; ".join(
            f"{d.field}: {d.prefill} on {ours}, {d.decode} on {theirs}" for d in self.differences
        )


def kind_of(worker: WorkerInfo) -> KvKind:
    """Return the kind of a worker. That of a worker without KV matches no other."""
    return ("", ()) if worker.kv is None else (worker.kv.compatibility, worker.kv.transports)


def exchange(prefill: KvKind, decode: KvKind) -> bool:
    """Return True if workers of these kinds can exchange KV."""
    return prefill[0] == decode[0] and not set(prefill[1]).isdisjoint(decode[1])


def unpaired(workers: Iterable[WorkerInfo]) -> Iterator[Unpaired]:
    """Yield each prefill and decode worker of one model that cannot exchange KV."""
    known = list(workers)
    prefills, decodes = ([x for x in known if x.role is r] for r in (Role.PREFILL, Role.DECODE))
    for prefill, decode in itertools.product(prefills, decodes):
        same_model = decode.model.name == prefill.model.name
        if same_model and (found := tuple(_differences(prefill.kv, decode.kv))):
            yield Unpaired(prefill, decode, found)


def _differences(prefill: KvEndpoint | None, decode: KvEndpoint | None) -> Iterator[Difference]:
    if prefill is None or decode is None:
        yield Difference("kv", *("an endpoint" if x else "no endpoint" for x in (prefill, decode)))
        return
    if prefill.compatibility != decode.compatibility:
        ours, theirs = prefill.layout, decode.layout
        differing = [x for x in {**ours, **theirs} if ours.get(x) != theirs.get(x)]
        for name in differing:
            yield Difference(name, ours.get(name, "none"), theirs.get(name, "none"))
        if not differing:
            yield Difference("compatibility", prefill.compatibility, decode.compatibility)
    if set(prefill.transports).isdisjoint(decode.transports):
        yield Difference(
            "transports", *("+".join(x.transports) or "none" for x in (prefill, decode))
        )
