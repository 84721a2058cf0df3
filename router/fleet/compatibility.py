"""Checks whether a worker can serve together with the registered workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from pdserve.kv_compatibility import kind_of, unpaired
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.types import WorkerInfo

logger = logging.getLogger(__name__)

# Fields that must be equal for all workers of a model: the router has one description of a model,
# and an answer may move between its workers.
SAME_OF_A_MODEL = (
    "vocab_size",
    "max_model_len",
    "aliases",
    "sampling_defaults",
    "tokenizer",
    "modalities",
)
Compared = tuple[object, ...]
"""What `check_compatible` compares of a worker. Equal ones give equal results."""


def compared(info: WorkerInfo) -> Compared:
    values = (getattr(info.model, name) for name in SAME_OF_A_MODEL)
    fields = [(*sorted(x.items()),) if isinstance(x, Mapping) else x for x in values]
    return (info.model.name, info.role, kind_of(info), *fields)


def check_compatible(info: WorkerInfo, registered: Iterable[WorkerInfo]) -> None:
    """Raise InvalidRequest, naming the field, if the worker cannot serve together with the
    registered ones. Log the workers with which it cannot exchange KV."""
    others = [x for x in registered if x.worker_id != info.worker_id]
    if info.role in (Role.PREFILL, Role.DECODE, Role.ENCODE) and info.kv is None:
        raise InvalidRequest(
            f"worker {info.worker_id}: a {info.role} worker needs a kv endpoint",
            field="worker.kv",
        )
    if info.role is Role.ENCODE and info.kv is not None and not info.kv.embedding_bytes:
        text = f"worker {info.worker_id}: an encode worker needs kv.embedding_bytes"
        raise InvalidRequest(text, field="worker.kv.embedding_bytes")
    for other in others:
        if other.model.name != info.model.name:
            if shared := set(info.model.names) & set(other.model.names):
                raise InvalidRequest(
                    f"worker {info.worker_id}: {sorted(shared)} is a name of model "
                    f"{other.model.name} on worker {other.worker_id}",
                    field="worker.model.aliases",
                )
            continue
        for name in SAME_OF_A_MODEL:
            if name == "max_model_len" and Role.ENCODE in (info.role, other.role):
                continue  # it has no KV cache that could limit the context
            ours, theirs = getattr(info.model, name), getattr(other.model, name)
            if ours != theirs:
                raise InvalidRequest(
                    f"worker {info.worker_id}: model {info.model.name} has {name} {ours}, but "
                    f"{theirs} on worker {other.worker_id}",
                    field=f"worker.model.{name}",
                )
    for pair in unpaired([info, *others]):
        if info in (pair.prefill, pair.decode):
            logger.warning(
                "%s and %s cannot exchange KV and will not be paired: %s",
                pair.prefill.worker_id,
                pair.decode.worker_id,
                pair.reason,
            )
