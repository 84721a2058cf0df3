"""Fetches the tokenizer of a model from its workers, because a router has no model files.

Workers register with a digest of the tokenizer's files. A worker whose tokenizer or chat template
differs from that of its model is refused at registration, and a tokenizer is fetched only once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.model.tokenizer import Tokenizer, digest_of
from pdserve.v1 import worker_pb2 as w
from router.operations.drain import worker_stub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.net.rpc import Dialer
    from pdserve.types import ModelInfo
    from router.fleet.member import Member
    from router.fleet.registry import Fleet

FETCH_TIMEOUT_S = 10.0


async def fetch_tokenizer(fleet: Fleet, dialer: Dialer, model: ModelInfo) -> Tokenizer:
    """Return the tokenizer of the first worker that sends it. Raises Unavailable with the last
    failure, and ConfigError if the files are no valid tokenizer."""
    if not model.tokenizer:
        raise ConfigError("its workers have none that a router can use", field="model")
    failure = "no worker is there"
    for member in (*fleet.of_model(model.name), *fleet.pooling(model.name)):
        if member.lost:
            continue
        try:
            files = await _fetch(dialer, member, model.tokenizer)
        except PdserveError as error:
            failure = error.message
        else:
            # Loading takes long enough to delay the tokens of all streams.
            return await asyncio.to_thread(Tokenizer.load, files)
    raise Unavailable(failure)


async def _fetch(dialer: Dialer, member: Member, digest: str) -> Mapping[str, bytes]:
    async with worker_stub(dialer, member) as stub:
        answer = await stub.GetTokenizer(
            w.GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S, metadata=dialer.metadata
        )
    files = dict(answer.files)
    if (found := digest_of(files)) != digest:
        raise Unavailable(
            f"worker {member.worker_id}: the files of its tokenizer have changed: digest {found}, "
            f"registered with {digest}"
        )
    return files
