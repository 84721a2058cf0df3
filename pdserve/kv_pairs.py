"""Which prefill and decode workers can exchange KV, and in words why others cannot. The router
places by it and `pdserve status` shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.types import KvEndpoint, WorkerInfo

# All that decides it: equal kinds exchange KV with the same workers.
KvKind = tuple[str, tuple[str, ...]]

_ABSENT = "none"


@dataclass(frozen=True, slots=True)
class Difference:
    """A property that both would have to share, as each of the two has it."""

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
        """In words, with the workers' names."""
        ours, theirs = self.prefill.worker_id, self.decode.worker_id
        return "; ".join(
            f"{d.field}: {d.prefill} on {ours}, {d.decode} on {theirs}" for d in self.differences
        )


def kind_of(worker: WorkerInfo) -> KvKind:
    """Of a worker without KV, the kind that exchanges it with none."""
    return ("", ()) if worker.kv is None else (worker.kv.compatibility, worker.kv.transports)


def exchange(prefill: KvKind, decode: KvKind) -> bool:
    """Whether a worker of one kind can hand KV to one of the other."""
    return prefill[0] == decode[0] and not set(prefill[1]).isdisjoint(decode[1])


def unpaired(workers: Iterable[WorkerInfo]) -> Iterator[Unpaired]:
    """Every prefill and decode worker of one model that cannot exchange KV."""
    known = list(workers)
    decodes = [x for x in known if x.role is Role.DECODE]
    for prefill in (x for x in known if x.role is Role.PREFILL):
        for decode in decodes:
            if decode.model.name != prefill.model.name:
                continue
            if not exchange(kind_of(prefill), kind_of(decode)):
                found = tuple(_differences(prefill.kv, decode.kv))
                yield Unpaired(prefill, decode, found)


def _differences(prefill: KvEndpoint | None, decode: KvEndpoint | None) -> Iterator[Difference]:
    if prefill is None or decode is None:
        yield Difference("kv", _has(prefill), _has(decode))
        return
    if prefill.compatibility != decode.compatibility:
        ours, theirs = prefill.layout, decode.layout
        differing = [x for x in {**ours, **theirs} if ours.get(x) != theirs.get(x)]
        for name in differing:
            yield Difference(name, ours.get(name, _ABSENT), theirs.get(name, _ABSENT))
        if not differing:
            yield Difference("compatibility", prefill.compatibility, decode.compatibility)
    if set(prefill.transports).isdisjoint(decode.transports):
        yield Difference("transports", _list(prefill.transports), _list(decode.transports))


def _has(endpoint: KvEndpoint | None) -> str:
    return "no endpoint" if endpoint is None else "an endpoint"


def _list(names: tuple[str, ...]) -> str:
    return "+".join(names) or _ABSENT
