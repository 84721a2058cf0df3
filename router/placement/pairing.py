"""Which workers of a model can exchange KV, and in words what is missing where none can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ModelNotFound, Unavailable
from pdserve.kv_pairs import exchange, unpaired
from pdserve.types import Role
from router.fleet.member import MemberState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.kv_pairs import KvKind
    from router.placement.values import Candidate

_MAX_REASONS = 3


def sources_of(giving: set[KvKind], taking: set[KvKind]) -> dict[KvKind, set[KvKind]]:
    """For each kind of decode worker that can have KV at all, the kinds that can give it some."""
    found = {kind: {giver for giver in giving if exchange(giver, kind)} for kind in taking}
    return {kind: kinds for kind, kinds in found.items() if kinds}


def check_servable_alone(candidates: Sequence[Candidate], model: str) -> None:
    """Raises Unavailable, naming what is missing, unless a worker of `model` is ready: each can do
    both phases."""
    if not any(c.state is MemberState.READY for c in candidates):
        check_servable(candidates, model)


def check_servable(candidates: Sequence[Candidate], model: str) -> None:
    """Raises Unavailable, naming what is missing, unless `model` can be placed on an idle pool, one
    phase apart from the other where its workers have roles."""
    ready = [c for c in candidates if c.state is MemberState.READY]
    if any(c.role is Role.AGGREGATED for c in ready):
        return
    prefills = [c for c in ready if c.role is Role.PREFILL]
    decodes = [c for c in ready if c.role is Role.DECODE]
    if not sources_of({c.kind for c in prefills}, {c.kind for c in decodes}):
        raise Unavailable(what_is_missing(model, prefills, decodes))


def check_known(candidates: Sequence[object], model: str, *, others: Iterable[str]) -> None:
    """Raises ModelNotFound where workers serve other models alone, Unavailable where there are no
    workers at all."""
    if candidates:
        return
    names = ", ".join(sorted(others))
    if names:
        raise ModelNotFound(f"model {model} is not served here; served are: {names}", field="model")
    raise Unavailable("no worker is registered")


def with_states(error: Unavailable, candidates: Iterable[Candidate]) -> Unavailable:
    """`error`, and what the workers do that are not ready."""
    others = [c for c in candidates if c.state is not MemberState.READY]
    if not others:
        return error
    said = ", ".join(f"{c.worker_id} is {c.state}" for c in others[:_MAX_REASONS])
    more = len(others) - _MAX_REASONS
    text = f"{error.message}: {said}" + (f" and {more} more are not ready" if more > 0 else "")
    return Unavailable(text, retry_after_s=error.retry_after_s, reason=error.reason)


def what_is_missing(model: str, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> str:
    """Why no pair of these can serve `model`."""
    if prefills and decodes:
        pairs = list(unpaired(c.info for c in (*prefills, *decodes)))
        reasons = " | ".join(pair.reason for pair in pairs[:_MAX_REASONS])
        more = len(pairs) - _MAX_REASONS
        return (
            f"no decode worker for model {model} can receive KV from a prefill worker: {reasons}"
            + (f" | and {more} more pairs" if more > 0 else "")
        )
    roles = [role for role, found in (("prefill", prefills), ("decode", decodes)) if not found]
    return f"no {' and no '.join(f'{role} worker' for role in roles)} is ready for model {model}"
