"""The tokenizer of a model, from its workers: a router has no models.

Workers register with the digest of its files. So workers of one model whose tokenizers or chat
templates differ are found out then, and a tokenizer is fetched once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.tokenizer import Tokenizer, digest_of
from pdserve.v1 import worker_pb2 as w
from router.operations import worker_stub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.types import ModelInfo
    from router.fleet.member import Member
    from router.fleet.registry import Fleet

FETCH_TIMEOUT_S = 10.0


async def fetch_tokenizer(fleet: Fleet, model: ModelInfo) -> Tokenizer:
    """Return the tokenizer from the first worker that sends it. Raises Unavailable with the last
    failure, and ConfigError for files that make no tokenizer."""
    if not model.tokenizer:
        raise ConfigError("its workers have none that a router can use", field="model")
    failure = "no worker is there"
    for member in (*fleet.of_model(model.name), *fleet.pooling(model.name)):
        if member.lost:
            continue
        try:
            files = await _fetch(fleet, member, model.tokenizer)
        except PdserveError as error:
            failure = error.message
        else:
            return await asyncio.to_thread(Tokenizer.load, files)
    raise Unavailable(failure)


async def _fetch(fleet: Fleet, member: Member, digest: str) -> Mapping[str, bytes]:
    async with worker_stub(fleet, member) as stub:
        answer = await stub.GetTokenizer(
            w.GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S, metadata=fleet.dialer.metadata
        )
    files = dict(answer.files)
    if (found := digest_of(files)) != digest:
        raise Unavailable(
            f"worker {member.worker_id}: the files of its tokenizer have changed: digest {found}, "
            f"registered with {digest}"
        )
    return files
